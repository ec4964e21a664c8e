"""What goes together with experts that are spread over ranks; see `capabilities`, whose checks hold beside these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trilithon.config import Axes, Config
from trilithon.engine.capabilities import KINDS, communicates, refusals
from trilithon.errors import ConfigError


def expert_table(kinds: Iterable[str] = KINDS) -> str:
    """Markdown: update rules against ZeRO stages when experts are spread over ranks."""
    lines = ["| update rule | stage 0 | stage 1 | stage 2 | stage 3 |", "| --- | --- | --- | --- | --- |"]
    for kind in kinds:
        cell = "if elementwise" if kind == "foreign" else "no" if communicates(kind) else "yes"
        lines.append(f"| {kind} | " + " | ".join([cell] * 4) + " |")
    return "\n".join(lines)


def require_rule_for_experts(kind: str, degrees: Sequence[int]) -> None:
    """Raises ConfigError for a rule that exchanges gradients itself, if experts are spread over `degrees` ranks."""
    if degrees and communicates(kind):
        raise ConfigError(
            f"optimizer {kind} exchanges gradients over all data-parallel ranks, and with ep_size {list(degrees)} "
            "experts are on some of them only. Use ep_size=1, or an optimizer that does not, such as adamw."
        )


def require_mesh_for_experts(settings: Config, axes: Axes) -> None:
    """Raises ConfigError for a mesh on which layers of experts would not see the tokens that they expect."""
    if settings.tensor.cut_norms and axes.size("tensor") > 1:
        raise ConfigError(
            "tensor.cut_norms gives tensor ranks different tokens, and the experts of this model take them to have "
            "the same ones, which they then share out. Leave tensor.cut_norms out."
        )


def require_experts_on_one_stage(degrees: Mapping[str, int], stages_of: Callable[[str], Sequence[int]]) -> None:
    """Raises ConfigError for a layer of experts that several stages of a pipeline share.

    degrees: of parameters of experts that are not on all data ranks alike. stages_of: the stages that hold one.
    """
    for name, degree in degrees.items():
        stages = stages_of(name)
        if len(stages) > 1:
            raise ConfigError(
                f"parameter '{name}' is shared by stages {list(stages)} of the pipeline, and its experts are spread "
                f"over ranks (ep_size={degree}) or share tokens out over tensor ranks. Give each stage experts of its "
                "own, or use ep_size=1 and mesh.tensor=1."
            )


_ROWS: Sequence[tuple[str, Mapping[str, Any]]] = (
    *((f"`zero.stage` {stage}", {"zero": {"stage": stage}}) for stage in range(4)),
    *((f"`offload.state` {tier}, stages 1 to 3", {"zero": {"stage": 2}, "offload": {"state": tier, **place}})
      for tier, place in (("host", {}), ("disk", {"path": "state"}))),
    *((f"`offload.parameters` {tier}, stage 3", {"zero": {"stage": 3}, "offload": {"parameters": tier, **place}})
      for tier, place in (("host", {}), ("disk", {"path": "state"}))),
    ("`offload.delayed_update`", {"zero": {"stage": 2}, "offload": {"state": "host", "delayed_update": True}}),
    ("`precision` bf16", {"precision": "bf16"}),
    ("`precision` fp16", {"precision": "fp16"}),
    ("`recompute`", {"recompute": {}}),
    ("`mesh.tensor`", {"mesh": {"tensor": 2}}),
    ("`mesh.tensor` with `tensor.cut_norms`", {"mesh": {"tensor": 2}, "tensor": {"cut_norms": True}}),
    ("`mesh.sequence`", {"mesh": {"sequence": 2}}),
    *((f"`mesh.pipe`, `zero.stage` {stage}", {"mesh": {"pipe": 2}, "zero": {"stage": stage}}) for stage in range(4)),
    *((f"`mesh.pipe`, schedule {schedule}", {"mesh": {"pipe": 2}, "pipeline": {"schedule": schedule}})
      for schedule in ("gpipe", "interleaved", "zero-bubble")),
    ("`mesh.pipe`, `pipeline.recompute_interval`", {"mesh": {"pipe": 2}, "pipeline": {"recompute_interval": 1}}),
    ("`mesh.pipe` and `mesh.tensor`", {"mesh": {"pipe": 2, "tensor": 2}}),
    ("`moe.all_to_all` hierarchical", {"moe": {"all_to_all": "hierarchical"}}),
    ("`moe.data_before_experts`", {"moe": {"data_before_experts": True}}),
)  # fmt: skip


def expert_combinations() -> str:
    """Markdown: settings beside experts over ranks, from the checks that run when an engine is made."""
    lines = ["| with experts over ranks | | |", "| --- | --- | --- |"]
    for name, wanted in _ROWS:
        reason = _refusal(Config.load({"optimizer": {"kind": "adamw", "lr": 1e-3}, **wanted}))
        lines.append(f"| {name} | {'no' if reason else 'yes'} | {reason} |")
    return "\n".join(lines)


def _refusal(settings: Config) -> str:
    """Why an engine with experts over ranks refuses these settings; empty if it does not."""
    found = [refusal.text for refusal in refusals(settings)]
    mesh = settings.mesh
    try:
        require_mesh_for_experts(settings, mesh.axes(2 * mesh.pipe * mesh.sequence * mesh.tensor))
    except ConfigError as error:
        found.append(str(error))
    return " ".join(found)
