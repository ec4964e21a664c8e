"""What `deepspeed.checkpoint` has besides commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SubparamShape:
    """Of parameters that are several in one, in a model's `universal_checkpoint_info()`."""

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """The same structure with tensors of their own on `device`: a view saves its elements, not its whole buffer."""
    if isinstance(item, Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, list | tuple):
        parts = [clone_tensors_for_torch_save(value, device) for value in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return item
