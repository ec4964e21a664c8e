"""From what the user passed as `optimizer` to the update rule that runs.

A torch optimizer whose formula we have (exactly Adam, AdamW, SGD or Adagrad, without exotic flags) is only read: its
groups stay live, its own step is never called. Any other optimizer runs itself, over the flat masters, if a probe finds
that it treats every element on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trilithon.config.compressed import ApmSqueeze as ApmSqueezeConfig
from trilithon.config.compressed import OneBitAdam as OneBitAdamConfig
from trilithon.config.compressed import OneBitLamb as OneBitLambConfig
from trilithon.config.compressed import ZeroOneAdam as ZeroOneAdamConfig
from trilithon.contracts import StateStore, Update
from trilithon.errors import ConfigError, ProtocolError
from trilithon.optim.adagrad import AdagradRule
from trilithon.optim.adam import AdamRule
from trilithon.optim.apmsqueeze import ApmSqueeze
from trilithon.optim.compressors import make_compressor
from trilithon.optim.elementwise import Elementwise, Rule, Settings
from trilithon.optim.foreign import Foreign
from trilithon.optim.freeze import Freeze
from trilithon.optim.groups import AnyOptimizer, Declared, Group, OptimizerSettings
from trilithon.optim.lamb import LAMB_FIELDS, Lamb
from trilithon.optim.link import Link
from trilithon.optim.lion import LionRule
from trilithon.optim.onebit_adam import onebit_adam
from trilithon.optim.onebit_lamb import OneBitLamb
from trilithon.optim.phase import Compression
from trilithon.optim.probe import why_not_elementwise
from trilithon.optim.sgd import SgdRule
from trilithon.optim.tensors import Stack
from trilithon.optim.zero_one_adam import ZeroOneAdam

CompressedConfig = OneBitAdamConfig | OneBitLambConfig | ZeroOneAdamConfig | ApmSqueezeConfig

_RULES_BY_KIND: dict[str, Rule] = {
    "adam": AdamRule(decoupled=False),
    "adamw": AdamRule(decoupled=True),
    "sgd": SgdRule(),
    "lion": LionRule(),
    "adagrad": AdagradRule(),
}
_RULES_BY_TYPE: dict[type, Rule] = {
    torch.optim.Adam: AdamRule(decoupled=False),
    torch.optim.AdamW: AdamRule(decoupled=True),
    torch.optim.SGD: SgdRule(),
    torch.optim.Adagrad: AdagradRule(),
}
# Flags that change the formula in ways ours does not follow. fused, foreach and capturable choose an implementation
# and are ours to choose; maximize is followed.
_EXOTIC = ("amsgrad", "differentiable")


def make_update(
    optimizer: AnyOptimizer,
    groups: Sequence[Settings],
    names: Sequence[str],
    *,
    whole: bool = False,
    device: torch.device | str = "cpu",
    way_out: str = "Use zero.stage=0, where every rank holds whole parameters",
    store: StateStore | None = None,
    link: Link | None = None,
    stacks: Mapping[str, Stack] | None = None,
) -> Update:
    """The update rule for `optimizer` over `groups` (of `groups_of`, read live at every step).

    names: every parameter that any rank updates, in the same order on all ranks. whole: each rank holds every parameter
    whole (no sharding), so a rule that is not elementwise can run too. device: where ranks add up small vectors.
    way_out: what a rule that needs whole parameters can be told to change.
    store: where state rests, closed with the rule; None keeps it where the masters are.
    link: to the ranks' local gradients, for rules that communicate themselves. stacks: by name, parameters whose
    members count as tensors of their own to rules with norms per tensor.
    Raises ConfigError if the optimizer cannot run over slices, or has already made steps of its own.
    """
    if isinstance(optimizer, Declared):
        optimizer.take_over()
        optimizer = optimizer.section
    if isinstance(optimizer, OptimizerSettings):
        if optimizer.kind == "lamb":
            return Lamb(groups, names, device, store, stacks)
        if isinstance(optimizer, CompressedConfig):
            return _compressed(optimizer, groups, names, link, stacks)
        return Elementwise(_RULES_BY_KIND[optimizer.kind], groups, store=store)
    owner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _owner(groups)
    _refuse_used(owner)
    rule = _rule_like(owner, groups)
    if rule is not None:
        owner.state.clear()  # Adagrad allocates its sums when it is made
        return Elementwise(rule, groups, owner.register_step_pre_hook(_refuse_step), store)
    reason = None if whole else why_not_elementwise(owner)
    if reason is not None:
        raise ConfigError(
            f"{type(owner).__name__} cannot update slices of parameters: {reason}. {way_out}, or an elementwise "
            'optimizer, or optimizer.kind="lamb" for per-parameter scaling.'
        )
    return Foreign(owner, groups, whole=whole)


def state_fields(optimizer: AnyOptimizer, groups: Sequence[Settings]) -> int | None:
    """Tensors that the rule for `optimizer` keeps per element beside the masters; None if the optimizer runs itself."""
    if isinstance(optimizer, Declared):
        optimizer = optimizer.section
    if isinstance(optimizer, OptimizerSettings) and optimizer.kind == "lamb":
        return len(LAMB_FIELDS)
    rule: Rule | None
    if isinstance(optimizer, OptimizerSettings):
        rule = _RULES_BY_KIND.get(optimizer.kind)
    else:
        rule = _rule_like(optimizer if isinstance(optimizer, torch.optim.Optimizer) else _owner(groups), groups)
    if rule is None:
        return None
    moving = [{**group, "momentum": group.get("momentum") or 0.9} for group in groups]  # it may be switched on later
    return max((len(rule.fields(group)) for group in moving), default=0)


def _rule_like(owner: torch.optim.Optimizer, groups: Sequence[Settings]) -> Rule | None:
    """The rule of ours that does what a torch optimizer does."""
    exotic = any(group.get(flag) for group in groups for flag in _EXOTIC)
    rule = None if exotic else _RULES_BY_TYPE.get(type(owner))
    if isinstance(rule, AdamRule) and groups and all("decoupled_weight_decay" in group for group in groups):
        return AdamRule(decoupled=all(group["decoupled_weight_decay"] for group in groups))
    return rule


def _compressed(
    section: CompressedConfig, groups: Sequence[Settings], names: Sequence[str], link: Link | None,
    stacks: Mapping[str, Stack] | None,
) -> Update:  # fmt: skip
    match section:
        case OneBitAdamConfig():
            return onebit_adam(
                groups,
                link,
                freeze_step=section.freeze_step,
                scale_norm=section.scale_norm,
                auto_mask=section.auto_mask,
                per_tensor_scaling=section.per_tensor_scaling,
            )
        case ApmSqueezeConfig():
            server = section.server_compressor
            by = Compression(
                make_compressor(section.compressor),
                make_compressor(server) if server is not None else None,
                target=section.compress_target,
                error_feedback=section.error_feedback,
                auto_mask=section.auto_mask,
                per_tensor_scaling=section.per_tensor_scaling,
            )
            return ApmSqueeze(groups, Freeze(section.freeze_step), by, link)
        case OneBitLambConfig():
            return OneBitLamb(groups, names, section, link, stacks)
        case ZeroOneAdamConfig():
            return ZeroOneAdam(groups, section, link)


def _owner(groups: Sequence[Settings]) -> torch.optim.Optimizer:
    for group in groups:
        if isinstance(group, Group) and group.optimizer is not None:
            return group.optimizer
    raise ConfigError(
        "An optimizer class was given, but the groups were not made from it; pass what groups_of(model, "
        "optimizer) returns."
    )


def _refuse_used(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        steps = state.get("step", None) if isinstance(state, dict) else None
        if state and (steps is None or float(steps) > 0):
            made = "steps" if steps is None else f"{int(float(steps))} steps"
            raise ConfigError(
                f"The {type(optimizer).__name__} passed to initialize has already made {made}, and its state covers "
                "whole parameters. Pass a fresh optimizer; to continue a run, load a checkpoint through the engine."
            )


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Its parameters have no `grad`, so its own step would do nothing and say nothing."""
    raise ProtocolError(
        f"{type(optimizer).__name__}.step() would change nothing: an engine holds the gradients and updates the "
        "parameters. Call engine.step() instead (or engine.close() first)."
    )


def describe(update: Any) -> str:
    """One line on which rule runs, for logs."""
    return update.name if isinstance(update, Foreign) else str(update.state_dict()["rule"])
