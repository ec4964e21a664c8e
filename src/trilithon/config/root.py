"""The whole configuration, and the one way to read it: `Config.load`.

A configuration is a JSON or TOML file, JSON text, a dict or a `Config`; a file written for DeepSpeed is recognised by
its keys and mapped. Everything wrong with it is reported in one ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import PrivateAttr, ValidationError

from trilithon.config import sources
from trilithon.config.base import Count, NonNegativeReal, Section, describe, dotted, kind_of, place, show
from trilithon.config.batch import BatchConfig, ResolvedBatch
from trilithon.config.checkpoints import CheckpointConfig
from trilithon.config.comm import CommConfig
from trilithon.config.deepspeed_json import check_batch, native_names, read_deepspeed, recognise
from trilithon.config.deepspeed_keys import TABLE
from trilithon.config.deepspeed_release import Release
from trilithon.config.deepspeed_release import deepspeed_release as release_in_force
from trilithon.config.mesh import MeshConfig, TensorConfig
from trilithon.config.moe import MoEConfig
from trilithon.config.monitor import MonitorConfig
from trilithon.config.naming import field_path, unknown_keys
from trilithon.config.offload import OffloadConfig
from trilithon.config.optimizer import OptimizerConfig
from trilithon.config.origin import (
    DEFAULT,
    Draft,
    Origin,
    OriginKind,
    Problem,
    Source,
    leaves,
    plain,
    raise_if_any,
    values_of,
)
from trilithon.config.pipeline import PipelineConfig
from trilithon.config.precision import Fp16, Fp32, PrecisionConfig
from trilithon.config.recompute import RecomputeConfig
from trilithon.config.schedule import ScheduleConfig
from trilithon.config.zero import ZeroConfig
from trilithon.errors import BatchError, ConfigError


class Config(Section):  # noqa: PLW1641 (pydantic gives frozen classes their __hash__)
    """Everything a training run is told. Each part is handed to the package that reads it."""

    seed: Count = 0
    """Seed of every random generator; each rank adds what it needs to differ."""
    batch: BatchConfig = BatchConfig()
    """Sizes of batches."""
    precision: PrecisionConfig = Fp32()
    """Number format of parameters: "fp32", "bf16", "fp16", or a block with its settings."""
    zero: ZeroConfig = ZeroConfig()
    """How state is cut over the data-parallel ranks."""
    mesh: MeshConfig = MeshConfig()
    """How many parts the model and the batch are cut into."""
    tensor: TensorConfig = TensorConfig()
    """How matrices are cut over the tensor axis of the mesh."""
    pipeline: PipelineConfig = PipelineConfig()
    """How the stages of the mesh's pipe axis take turns."""
    offload: OffloadConfig = OffloadConfig()
    """What rests in host memory or on disk."""
    comm: CommConfig = CommConfig()
    """How ranks talk."""
    moe: MoEConfig = MoEConfig()
    """How experts are spread over ranks."""
    optimizer: OptimizerConfig | None = None
    """The update rule: its name, or a block with its settings. null: the caller passes an optimizer."""
    lr_schedule: ScheduleConfig | None = None
    """The learning-rate schedule: its name, or a block with its settings. null: the rate stays as it is."""
    clip_norm: NonNegativeReal = 0.0
    """Largest 2-norm of the whole gradient; a larger one is scaled down to it. 0 turns clipping off."""
    recompute: RecomputeConfig | None = None
    """Activations to compute again in backward instead of keeping them. null: none; {}: those of repeated blocks."""
    monitor: MonitorConfig = MonitorConfig()
    """What is recorded."""
    checkpoints: CheckpointConfig = CheckpointConfig()
    """Which checkpoints stay, and how large their files get."""

    _sources: dict[str, Source] = PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = PrivateAttr(default=())
    _private: dict[str, Any] = PrivateAttr(default_factory=dict)
    _release: Release | None = PrivateAttr(default=None)

    def __eq__(self, other: object) -> bool:
        """Equal settings make equal configurations, wherever they came from."""
        if not isinstance(other, Config):
            return NotImplemented
        return self.__dict__ == other.__dict__

    @classmethod
    def load(
        cls,
        source: Path | str | Mapping[str, Any] | Config,
        *,
        overrides: Mapping[str, Any] | None = None,
        auto: Mapping[str, Any] | None = None,
        expected: Mapping[str, Any] | None = None,
        deepspeed_release: str | None = None,
        name: str = "config",
    ) -> Config:
        """Read a configuration; the arguments are those of `examine`. Raises one ConfigError listing all problems."""
        found = examine(
            source,
            overrides=overrides,
            auto=auto,
            expected=expected,
            deepspeed_release=deepspeed_release,
            name=name,
        )
        raise_if_any(list(found.problems))
        assert found.config is not None, "a configuration without problems was built"
        return found.config

    def resolve_batch(self, data_parallel_size: int | None) -> ResolvedBatch:
        """`batch.resolve`, and an error that also says where each size was written."""
        try:
            return self.batch.resolve(data_parallel_size)
        except ConfigError as error:
            sizes = [item for item in explain(self) if item.key.startswith("batch.") and item.value is not None]
            written = "; ".join(f"{item.key} comes from {item.source}" for item in sizes)
            text = f"{error} ({written}.)" if written else str(error)
            if self._release is not None and isinstance(error, BatchError):  # the words that programs look for
                text = f"Check batch related parameters: {text}"
            raise type(error)(text) from None

    @property
    def notes(self) -> tuple[str, ...]:
        """Settings that were accepted but have no effect, or mean something slightly different here."""
        return self._notes

    @property
    def deepspeed_release(self) -> Release | None:
        """The release of DeepSpeed by whose rules it was read from a DeepSpeed file; None if it was not."""
        return self._release

    @property
    def private(self) -> Mapping[str, Any]:
        """Top-level keys that begin with an underscore, such as "_notes" (and "$schema"): never read by us."""
        return dict(self._private)


@dataclass(frozen=True, slots=True)
class Examined:
    """What reading a configuration found. `config` is None when there are problems."""

    config: Config | None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    where: str
    format: Literal["native", "deepspeed"]
    deepspeed_release: Release | None = None
    """By whose rules a DeepSpeed file was read; None for a native configuration."""
    values: Mapping[str, tuple[Any, Source]] = field(default_factory=dict)
    """Every native key that was set, dotted: its value, checked if `config` is there, and where that was written."""


def examine(
    source: Path | str | Mapping[str, Any] | Config,
    *,
    overrides: Mapping[str, Any] | None = None,
    auto: Mapping[str, Any] | None = None,
    expected: Mapping[str, Any] | None = None,
    deepspeed_release: str | None = None,
    name: str = "config",
) -> Examined:
    """Read a configuration and report instead of raising.

    source: path of a JSON or TOML file, JSON text, a dict, or a Config. DeepSpeed files are recognised by their keys.
    overrides: values that win, by dotted native key ("zero.stage") or as nested blocks.
    auto: values for keys a DeepSpeed file leaves as "auto", by dotted DeepSpeed key.
    expected: values the caller computed from its own arguments, by dotted key of the file's own format; each "auto" is
        filled from them and each different value is a problem.
    deepspeed_release: "0.19" or "0.16", by whose rules a DeepSpeed file is read (`config.deepspeed_release`). None:
        what the environment variable TRILITHON_DEEPSPEED_RELEASE says, else "0.19".
    name: what messages call a dict, such as the file that it was read from.
    """
    release = release_in_force(deepspeed_release)
    draft, form = _draft(source, auto or {}, expected or {}, release, name)
    _apply_overrides(draft, overrides or {})
    if form == "deepspeed":
        check_batch(draft)
    for key, text in unknown_keys(draft.values, Config):
        theirs = native_names(TABLE).get(key.rpartition(".")[2])
        hint = f"; what DeepSpeed calls so is {theirs} here" if theirs else ""
        _add_problem(draft, key, f"{key}: {text}{hint}")
    config = _build(draft)
    if config is not None:
        draft.notes.extend(_without_effect(config, draft))
        config._sources = {key: draft.source_of(key) for key, _ in values_of(config)}
        config._notes, config._private = tuple(draft.notes), draft.private
        inherited = source._release if isinstance(source, Config) else None
        config._release = release if form == "deepspeed" else inherited
    told = release if form == "deepspeed" else None
    return Examined(config, tuple(draft.problems), tuple(draft.notes), draft.where, form, told, _set_in(draft, config))


def _set_in(draft: Draft, config: Config | None) -> dict[str, tuple[Any, Source]]:
    """What is not left at its default: as the finished configuration has it, else as it was written."""
    if config is None:
        return {key: (value, draft.source_of(key)) for key, value in leaves(draft.values)}
    return {item.key: (item.value, item.source) for item in explain(config) if item.kind != "default"}


def explain(config: Config) -> list[Origin]:
    """Every value in force with its origin, in the order of the reference."""
    by_hand = {} if config._sources else {key: Source("argument", "Config", key) for key, _ in leaves(plain(config))}
    return [
        Origin(key, value, config._sources.get(key) or by_hand.get(key, DEFAULT)) for key, value in values_of(config)
    ]


def _draft(
    source: object, auto: Mapping[str, Any], expected: Mapping[str, Any], release: Release, name: str
) -> tuple[Draft, Literal["native", "deepspeed"]]:
    """The native draft of any source, still unchecked, and the format it was written in."""
    if isinstance(source, Config):
        draft = Draft("Config", values=plain(source), private=dict(source._private))
        draft.sources = {origin.key: origin.source for origin in explain(source) if origin.kind != "default"}
        _compare(draft, expected)
        return draft, "native"
    if isinstance(source, (str, Path)):
        raw, where = sources.read(source)
        kind: OriginKind = "file"
    elif isinstance(source, Mapping):
        where, kind = name, "argument"
        try:
            raw = plain(source)
        except RecursionError:
            raise ConfigError(f"{name}: its blocks are nested without end; give a finite dict.") from None
    else:
        raise ConfigError(
            f"a configuration cannot be read from {show(source)} ({kind_of(source)}): give a path, JSON text, a dict "
            "or a Config."
        )
    draft = Draft(where)
    for key in [key for key in raw if not isinstance(key, str)]:
        draft.problem(show(key), f"{show(key)}: a key must be text, not {kind_of(key)}")
    raw = {key: value for key, value in raw.items() if isinstance(key, str)}
    draft.private = {key: raw.pop(key) for key in list(raw) if key.startswith("_") or key == "$schema"}
    form = recognise(raw, Config.model_fields, draft)
    if form == "deepspeed":
        read_deepspeed(raw, draft, native=Config.model_fields, auto=auto, expected=expected, release=release)
        return draft, form
    if draft.problems:  # keys of both formats: those of the other one are not reported again
        raw = {key: value for key, value in raw.items() if key in Config.model_fields}
    draft.values = raw
    draft.sources = {key: Source(kind, where, key) for key, _ in leaves(raw)}
    _compare(draft, expected)
    return draft, form


def _compare(draft: Draft, expected: Mapping[str, Any]) -> None:
    """A problem for each native key whose value is not the one the caller computed."""
    given = dict(leaves(draft.values))
    for key, value in leaves(expected):
        if key in given and given[key] != value:
            draft.problem(key, f"{key}={show(given[key])}, but the caller's arguments say {show(value)}; change one")


def _apply_overrides(draft: Draft, overrides: Mapping[str, Any]) -> None:
    """Set each override; a block that names its kind replaces the whole choice, another one only its own keys."""
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value and "kind" not in value:
            for below, leaf in leaves(plain(value), place("", key) + "."):
                draft.put(below, leaf, Source("override", "override", below))
        else:
            draft.put(place("", key), plain(value), Source("override", "override", place("", key)))


def _add_problem(draft: Draft, key: str, text: str) -> None:
    """Report a problem with a native key under the name and file its value was written in."""
    above = key
    while above and above not in draft.sources:  # a problem inside a list belongs to the key that holds the list
        above = above.rpartition(".")[0]
    source = draft.sources.get(above)
    if source is None:
        below = [source for leaf, source in draft.sources.items() if leaf.startswith(key + ".")]
        written = draft.names.get(key, key)
        text = written + text.removeprefix(key) if written != key else text
        draft.problem(written, text, next((source.where for source in below if source.where), None))
    elif source.key and source.key != above:
        written = source.key + key.removeprefix(above)
        draft.problem(written, written + text.removeprefix(key) + f" (it becomes {above})", source.where)
    else:
        draft.problem(key, text, source.where or None)


def _build(draft: Draft) -> Config | None:
    """The configuration of a draft, or None after adding each value's problem to the draft."""
    try:
        config = Config.model_validate(_printable(draft.values))
    except ValidationError as error:
        found: dict[str, list[Any]] = {}
        for item in error.errors():
            if item["type"] == "missing" and draft.unfinished:
                continue
            if item["type"] not in ("extra_forbidden", "union_tag_invalid", "union_tag_not_found"):  # reported already
                found.setdefault(dotted(field_path(Config, item["loc"])), []).append(item)
        for key, items in found.items():
            text = describe(key, items[0])
            others = [describe("", item).partition(": ")[2] for item in items[1:]]
            _add_problem(draft, key, " or ".join([text, *dict.fromkeys(other for other in others if other)]))
        if not draft.problems:  # an error of a kind the walk over the keys was expected to report
            draft.problem("", f"not a valid configuration: {describe('', error.errors()[0])}")
        return None
    return None if draft.problems else config


_STAGE_3_ONLY = (
    "reshard_after_forward",
    "prefetch_numel",
    "max_live_numel",
    "persist_below_numel",
    "persist_total_numel",
    "unit_classes",
    "keep_gathered",
    "tile_above_numel",
    "tile_modules",
)
_OFFLOAD_ONLY = ("ratio", "sub_group_numel")
_DISK_ONLY = ("path", "buffers", "threads", "piece_bytes", "direct")
_DYNAMIC_SCALE_ONLY = (
    "initial_scale_power",
    "window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_scale",
    "max_scale",
)


def _printable(value: Any) -> Any:
    """A nested block without the keys that are not text (reported already), and with numbers too long for text cut."""
    if isinstance(value, int) and value.bit_length() > 4096:
        return math.inf if value > 0 else -math.inf
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {name: _printable(below) for name, below in value.items() if isinstance(name, str)}


def _without_effect(config: Config, draft: Draft) -> list[str]:
    """Notes on settings that were written down but do nothing in this combination."""
    zero, monitor = config.zero, config.monitor
    idle = []
    if zero.stage < 3:
        why = f"no effect, because zero.stage is {zero.stage}, and only stage 3 gathers parameters"
        idle += [(f"zero.{name}", why) for name in _STAGE_3_ONLY]
    idle += _offload_without_effect(config)
    if monitor.folder is None:
        why = "no effect, because monitor.folder is not given"
        idle += [(f"monitor.{name}", why) for name in ("jsonl", "csv", "tensorboard") if getattr(monitor, name)]
    if isinstance(config.precision, Fp16) and config.precision.loss_scale > 0:
        why = f"no effect, because precision.loss_scale={config.precision.loss_scale:g} fixes the scale"
        idle += [(f"precision.{name}", why) for name in _DYNAMIC_SCALE_ONLY]
    if config.mesh.tensor == 1:
        cut = ("tensor.plan", "tensor.cut_norms", "recompute.partition")
        idle += [(name, "no effect, because mesh.tensor is 1") for name in cut]
    if config.recompute is not None and not config.recompute.contiguous:
        idle.append(("recompute.number", "no effect, because recompute.contiguous is false"))
    if config.recompute is not None and config.recompute.policy == "full":
        idle.append(("recompute.keep_ops", 'no effect, because recompute.policy is "full"'))
    if zero.persist_below_numel == 0 and zero.stage == 3:
        idle.append(("zero.persist_total_numel", "no effect, because zero.persist_below_numel is 0"))
    if zero.tile_above_numel is None and zero.stage == 3:
        idle.append(("zero.tile_modules", "no effect, because zero.tile_above_numel is not given"))
    written = ("file", "argument", "override", "deepspeed")
    return [f"{source.key or key}: {why}" for key, why in idle if (source := draft.source_of(key)).kind in written]


def _offload_without_effect(config: Config) -> list[tuple[str, str]]:
    offload, idle = config.offload, []
    if offload.state == "device":
        idle += [(f"offload.{name}", 'no effect, because offload.state is "device"') for name in _OFFLOAD_ONLY]
    if "disk" not in (offload.state, offload.parameters, offload.gradients):
        why = "no effect, because nothing rests on disk"
        idle += [(f"offload.{name}", why) for name in _DISK_ONLY]
    if not offload.delayed_update:
        idle.append(("offload.delay_after_steps", "no effect, because offload.delayed_update is false"))
    return idle
