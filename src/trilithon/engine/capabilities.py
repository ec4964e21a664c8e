"""Which features go together, checked in one place before any process group exists.

Each implementation names what it needs and what it gives; `conflicts` compares them and says, for everything that does
not fit, which setting to change. `compatibility_table` prints the same knowledge for the documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from trilithon.config import Axes, Config, ZeroConfig
from trilithon.errors import ConfigError


class Capability(Enum):
    """What one feature can rely on another for."""

    WHOLE_PARAMETERS = "whole parameters in the update"
    SHARDED_STATE = "optimizer state cut over ranks"
    ELEMENTWISE = "an update that treats each element on its own"
    LAYER_NORMS = "per-parameter norms over ranks"
    MASTERS_APART = "masters that are not the parameters themselves"
    FOLDER = "a folder (offload.path)"
    WHOLE_GRADIENTS = "whole local gradients until the update"
    MOVABLE_STATE = "an update rule whose state may rest elsewhere"
    SHARDED_PARAMETERS = "parameters that are gathered for use"


@dataclass(frozen=True, slots=True)
class Feature:
    """One choice. needs: what must be there; way_out: what to change when it is not."""

    name: str
    gives: frozenset[Capability] = frozenset()
    needs: frozenset[Capability] = frozenset()
    needs_any: frozenset[Capability] = frozenset()
    way_out: str = ""

    @property
    def key(self) -> str:
        """The setting that makes this choice, as the configuration calls it."""
        return "optimizer.kind" if "optimizer" in self.name else self.name.partition("=")[0]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that needs what the others do not give. key: of that setting; text: why, and the way out."""

    key: str
    text: str


def zero_stage(stage: int) -> Feature:
    """ZeRO's side of the contract."""
    whole = {Capability.WHOLE_GRADIENTS} if stage < 2 else set()
    if stage == 0:
        return Feature("zero.stage=0", gives=frozenset({Capability.WHOLE_PARAMETERS, Capability.LAYER_NORMS, *whole}))
    sharded = {Capability.SHARDED_PARAMETERS} if stage == 3 else set()
    return Feature(
        f"zero.stage={stage}",
        gives=frozenset({Capability.SHARDED_STATE, Capability.LAYER_NORMS, *whole, *sharded}),
        needs_any=frozenset({Capability.ELEMENTWISE, Capability.LAYER_NORMS}),
        way_out="use zero.stage=0, where every rank holds whole parameters, or an elementwise optimizer",
    )


def communicates(kind: str) -> bool:
    """The update rule exchanges local gradients over all data-parallel ranks by itself."""
    return Capability.WHOLE_GRADIENTS in update_rule(kind).needs


def update_rule(kind: str) -> Feature:
    """The update rule's side. kind: of `OptimizerConfig`, or "foreign" for a user's own optimizer class."""
    if kind == "lamb":
        return Feature(
            "optimizer lamb",
            gives=frozenset({Capability.MOVABLE_STATE}),
            needs=frozenset({Capability.LAYER_NORMS}),
            way_out="use another optimizer",
        )
    if kind == "zero_one_adam":
        return Feature(
            "optimizer zero_one_adam",
            needs=frozenset({Capability.WHOLE_PARAMETERS, Capability.WHOLE_GRADIENTS}),
            way_out="between its rounds every rank moves its own whole weights: use zero.stage=0, or onebit_adam",
        )
    if kind in ("onebit_adam", "onebit_lamb", "apmsqueeze"):
        return Feature(
            f"optimizer {kind}",
            needs=frozenset({Capability.WHOLE_GRADIENTS, Capability.LAYER_NORMS}),
            way_out="it averages momenta instead of gradients: use zero.stage 0 or 1, or an uncompressed optimizer",
        )
    ordinary = frozenset({Capability.ELEMENTWISE, Capability.MOVABLE_STATE})
    if kind == "foreign":  # a probe decides, once its parameters are known
        return Feature("your own optimizer", gives=ordinary)
    return Feature(f"optimizer {kind}", gives=ordinary)


def offloaded_state(state: str, *, path: bool) -> list[Feature]:
    """Masters and optimizer state off the device: slices are what is moved, and stage 0 has whole parameters."""
    if state == "device":
        return []
    name = f'offload.state="{state}"'
    features = [
        Feature(
            name,
            gives=frozenset({Capability.MASTERS_APART}),
            needs=frozenset({Capability.SHARDED_STATE}),
            way_out="set zero.stage to 1, 2 or 3, with one rank as well",
        )
    ]
    features.append(
        Feature(
            name,
            needs=frozenset({Capability.MOVABLE_STATE}),
            way_out='set offload.state to "device": compressed rules keep their state there; or use adamw or lamb',
        )
    )
    if state == "disk" and not path:
        features.append(Feature(name, needs=frozenset({Capability.FOLDER}), way_out="name one in offload.path"))
    return features


def offloaded_parameters(key: str, tier: str, *, path: bool) -> list[Feature]:
    """Parameters or gradients off the device. key: "offload.parameters" or "offload.gradients"."""
    if tier == "device":
        return []
    name, sharded = f'{key}="{tier}"', frozenset({Capability.SHARDED_PARAMETERS})
    features = [Feature(name, needs=sharded, way_out="set zero.stage to 3, with one rank as well")]
    if tier == "disk" and not path:
        features.append(Feature(name, needs=frozenset({Capability.FOLDER}), way_out="name one in offload.path"))
    return features


def delayed_update(on: bool) -> list[Feature]:
    """One step of delay: the update runs in the background, beside the forward that reads the old values."""
    if not on:
        return []
    name = "offload.delayed_update"
    apart, alone = frozenset({Capability.MASTERS_APART}), frozenset({Capability.ELEMENTWISE})
    return [
        Feature(name, needs=apart, way_out='set offload.state to "host" or "disk"'),
        Feature(name, needs=alone, way_out="use adam, adamw, sgd, lion or adagrad"),
    ]


def features_of(settings: Config, kind: str | None) -> list[Feature]:
    """What a configuration asks for. kind: as `update_rule` takes it; None without an optimizer.

    Gradients that go where parameters do ask for what these ask for.
    """
    offload, path = settings.offload, settings.offload.path is not None
    features = [
        zero_stage(settings.zero.stage),
        *offloaded_parameters("offload.parameters", offload.parameters, path=path),
        *offloaded_parameters("offload.gradients", offload.gradients or "device", path=path),
    ]
    if kind is not None:
        features += [
            update_rule(kind),
            *offloaded_state(offload.state, path=path),
            *delayed_update(offload.delayed_update),
        ]
    return features


def refusals(settings: Config) -> list[Refusal]:
    """Everything for which `initialize` refuses a configuration whatever the model, known without ranks.

    Without a configured optimizer the caller is taken to pass one.
    """
    kind, mesh = settings.optimizer.kind if settings.optimizer is not None else "foreign", settings.mesh
    found = _unmet(features_of(settings, kind))
    axes = mesh.axes(mesh.pipe * (mesh.data or 1) * mesh.sequence * mesh.tensor)
    for key, check in (
        ("mesh.pipe", lambda: require_pipeline(axes, settings)),
        ("zero.tile_above_numel", lambda: require_no_tiles(axes, settings.zero)),
        ("optimizer.kind", lambda: require_rule_for_mesh(kind, axes)),
        ("recompute.partition", lambda: require_whole_inputs(axes, settings)),
    ):
        try:
            check()
        except ConfigError as error:
            found.append(Refusal(key, str(error)))
    return found


def require_no_refusals(settings: Config) -> None:
    """Raises one ConfigError with all `refusals`."""
    _raise([refusal.text for refusal in refusals(settings)])


def conflicts(features: Sequence[Feature]) -> list[str]:
    """One line per need that no feature meets."""
    return [refusal.text for refusal in _unmet(features)]


def _unmet(features: Sequence[Feature]) -> list[Refusal]:
    given = {capability for feature in features for capability in feature.gives}
    found = []
    for feature in features:
        missing = feature.needs - given
        if feature.needs_any and not feature.needs_any & given:
            missing |= feature.needs_any
        if missing:
            what = ", ".join(sorted(capability.value for capability in missing))
            found.append(Refusal(feature.key, f"{feature.name} needs {what}; {feature.way_out}."))
    return found


def require_compatible(features: Sequence[Feature]) -> None:
    """Raises one ConfigError that lists every conflict."""
    _raise(conflicts(features))


def _raise(found: list[str]) -> None:
    if found:
        raise ConfigError("these settings do not go together:\n  - " + "\n  - ".join(found))


KINDS = (
    *("adamw", "sgd", "lion", "adagrad", "lamb", "onebit_adam", "onebit_lamb", "zero_one_adam", "apmsqueeze"),
    "foreign",
)


def require_rule_for_mesh(kind: str, axes: Axes) -> None:
    """Raises ConfigError for a rule that exchanges gradients itself, on a mesh where they are more than averaged."""
    cut = [f"mesh.{name}={axes.size(name)}" for name in ("pipe", "tensor", "sequence") if axes.size(name) > 1]
    if cut and communicates(kind):
        raise ConfigError(
            f"optimizer {kind} exchanges gradients of whole parameters over the data axis, and {' and '.join(cut)} "
            "gives ranks parts of them. Use 1 there, or an optimizer that does not, such as adamw."
        )


def require_pipeline(axes: Axes, settings: Config) -> None:
    """Raises ConfigError for what does not go with several stages of a pipeline."""
    stages = axes.size("pipe")
    if stages == 1:
        return
    if settings.zero.stage == 3:
        raise ConfigError(
            f"zero.stage=3 gathers every parameter for each micro-batch anew, and with mesh.pipe={stages} many are "
            "under way at once. Use zero.stage 0, 1 or 2 inside the stages, or mesh.pipe=1 with zero.stage=3."
        )
    if settings.tensor.cut_norms and axes.size("tensor") > 1:
        raise ConfigError(
            f"tensor.cut_norms cuts tokens where the token embedding leaves its sum, and with mesh.pipe={stages} only "
            "the first stage has one. Leave tensor.cut_norms out, or use mesh.pipe=1."
        )


def require_no_tiles(axes: Axes, settings: ZeroConfig) -> None:
    """Raises ConfigError for matrices that are to be cut twice."""
    if axes.size("tensor") > 1 and settings.stage == 3 and settings.tile_above_numel is not None:
        raise ConfigError(
            f"zero.tile_above_numel={settings.tile_above_numel} cuts linear layers into tiles, and mesh.tensor="
            f"{axes.size('tensor')} cuts them over ranks. Leave one of the two out."
        )


def require_whole_inputs(axes: Axes, settings: Config) -> None:
    """Raises ConfigError when inputs of blocks are to be cut over tensor ranks that have different tokens anyway."""
    partition = settings.recompute is not None and settings.recompute.partition
    if partition and settings.tensor.cut_norms and axes.size("tensor") > 1:
        raise ConfigError(
            "recompute.partition keeps a part of each block's input on each tensor rank, and with tensor.cut_norms "
            "that is all a rank has of it. Leave recompute.partition out: the memory is the same without it."
        )


def compatibility_table(kinds: Iterable[str] = KINDS) -> str:
    """Markdown: update rules against ZeRO stages, from the same declarations that are checked at run time."""
    lines = ["| update rule | stage 0 | stage 1 | stage 2 | stage 3 |", "| --- | --- | --- | --- | --- |"]
    for kind in kinds:
        rule = update_rule(kind)
        cells = ["no" if conflicts([zero_stage(stage), rule]) else "yes" for stage in range(4)]
        if kind == "foreign":
            cells = ["yes"] + ["if elementwise"] * 3
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
