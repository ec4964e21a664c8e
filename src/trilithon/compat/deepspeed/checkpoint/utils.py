"""`deepspeed.checkpoint.utils`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """The same structure with tensors of their own on `device`: a view saves its elements, not its whole buffer."""
    if isinstance(item, Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(clone_tensors_for_torch_save(value, device) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


__all__ = ["clone_tensors_for_torch_save"]
