"""Memory for what stays for the whole run: parameters, masters, moments, reduced gradients.

On the CPU it comes straight from the system, apart from the heap. State that is made between the short-lived tensors of
a step would otherwise pin the heap around it, and the process would grow by the gaps.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 18  # below this a mapping of its own costs more than it saves


def resident(numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """[numel] zeros that stay."""
    size = numel * dtype.itemsize
    if torch.device(device).type != "cpu" or size < _LEAST_BYTES:
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype, count=numel)


def settle(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of flat values that stays, in `dtype` if given."""
    copy = resident(values.numel(), dtype or values.dtype, values.device)
    return copy.copy_(values)


def filled(like: Tensor, value: float) -> Tensor:
    """Flat state shaped and typed as `like`, that stays."""
    made = resident(like.numel(), like.dtype, like.device)
    return made.fill_(value) if value else made


def off_device(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of flat values in host memory that stays, in `dtype` if given; an accelerator can reach it by itself."""
    if values.is_cuda:
        return torch.empty(values.numel(), dtype=dtype or values.dtype, pin_memory=True).copy_(values)
    return settle(values, dtype)
