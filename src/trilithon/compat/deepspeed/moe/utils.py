"""`deepspeed.moe.utils`: telling the parameters of experts from the others, for optimizers.

The engine does it by itself; these are for scripts that make parameter groups of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

import trilithon
from trilithon.errors import ConfigError


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(whether there are layers of experts, the experts of the first one, 0 without)."""
    found = [layer.num_experts for layer in m.modules() if isinstance(layer, trilithon.MoE)]
    return bool(found), found[0] if found else 0


def is_moe_param(param: Tensor) -> bool:
    """Of an expert of `deepspeed.moe.layer.MoE`."""
    return not getattr(param, "allreduce", True)


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(parameters that every rank has, those of experts)."""
    found = list(params)
    return [p for p in found if not is_moe_param(p)], [p for p in found if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """Each group without its expert parameters, then groups of those: by name of their ranks, `moe` True.

    Every group needs a "name". max_group_size: elements of a group of experts, beyond which another one begins; None
    for no limit. Raises ConfigError for a group without a name.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any("name" not in group for group in groups):
        raise ConfigError('a parameter group has no "name", by which the groups of its experts go. Give it one.')
    found: list[dict[str, Any]] = []
    for group in groups:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        by_name: dict[str, list[list[Tensor]]] = {}
        for param in experts:
            lists = by_name.setdefault(cast(Any, param).group_name, [[]])
            if lists[-1] and sum(p.numel() for p in lists[-1]) + param.numel() > (max_group_size or math.inf):
                lists.append([])
            lists[-1].append(param)
        found += [{**group, "params": p, "name": name, "moe": True} for name, lists in by_name.items() for p in lists]
    return [*groups, *found]


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameters, or groups of them, as groups with the experts apart."""
    found = list(model_parameters)
    if not found:
        raise ConfigError("there are no parameters to group.")
    groups = found if isinstance(found[0], dict) else [{"params": found}]
    for index, group in enumerate(groups):
        group.setdefault("name", f"group_{index}")
    return split_params_into_different_moe_groups_for_optimizer(groups)
