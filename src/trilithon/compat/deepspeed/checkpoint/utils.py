"""What `deepspeed.checkpoint` has besides commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class SubparamShape:
    """Of parameters that are several in one, in a model's `universal_checkpoint_info()`."""

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """The same structure with tensors of their own on `device`: a view saves its elements, not its whole buffer."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone().to(device), item)
