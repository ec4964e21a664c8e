"""Which elements take part in compressed communication.

An element without a gradient during the warm-up has zero variance; one bit cannot say zero, so it would receive steps
of +-scale / eps. Such elements are left out, and so is what the user masks by `exp_avg_mask` of a parameter group (rows
of a position table that this sequence length never reaches, say; Tang et al. 2021, arXiv:2102.02888). Masks belong to
the present run and are never taken from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trilithon.errors import ConfigError
from trilithon.optim.elementwise import Settings
from trilithon.optim.fused import Fused


def active_elements(vector: Fused, groups: Sequence[Settings], variance: Tensor | None) -> Tensor | None:
    """[numel] bool, or None if all are active. variance: [numel], the same on all ranks; None to look at masks only."""
    active = torch.ones(vector.numel, dtype=torch.bool, device=vector.flat.device)
    if variance is not None:
        active &= variance != 0
    for index, group in enumerate(groups):
        mask = group.get("exp_avg_mask")
        if mask is not None and not group.get("non_freeze"):
            _apply(vector, index, list(group["params"]), mask, active)
    return None if bool(active.all()) else active


def _apply(vector: Fused, index: int, names: list[str], mask: Tensor, active: Tensor) -> None:
    flat, at = torch.as_tensor(mask, device=active.device).reshape(-1), 0
    total = sum(vector.view(name).numel() for name in names if name in vector)
    if flat.numel() != total:
        raise ConfigError(
            f"exp_avg_mask of parameter group {index} has {flat.numel()} elements and the group's parameters "
            f"{names[:4]} have {total}. Give one 0 or 1 per element, in the order of the parameters."
        )
    for name in names:
        if name in vector:
            here = vector.view(name, active)
            here &= flat[at : at + here.numel()] != 0
            at += here.numel()
