"""Cutting a long flat tensor into runs that stay in cache.

The torch twins make many passes over their operands. Run over a whole slice, every pass goes to memory; run over 64 Ki
elements at a time, all but the first stay in the second-level cache. The twins use only operations that round once
(add, subtract, multiply, divide, square root, conversion), so neither this cutting nor any other changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 16


def chunks(like: Tensor) -> Iterator[slice]:
    """Ranges that cover [0, like.numel()): cache-sized on the CPU, one range elsewhere (launches cost more there)."""
    numel = like.numel()
    size = CHUNK_NUMEL if like.device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


def scratch(like: Tensor, count: int) -> list[Tensor]:
    """`count` uninitialised buffers of `like`'s dtype and device, each as long as the longest range of `chunks`."""
    numel = like.numel()
    size = min(CHUNK_NUMEL, numel) if like.device.type == "cpu" else numel
    return [torch.empty(size, dtype=like.dtype, device=like.device) for _ in range(count)]


def read_gradient_(out: Tensor, gradient: Tensor, grad_scale: float) -> Tensor:
    """out [n] becomes the gradient, widened to `out`'s dtype first and then multiplied; returns `out`."""
    out.copy_(gradient)
    if grad_scale != 1.0:
        out.mul_(grad_scale)
    return out


def square_root(x: Tensor, out: Tensor) -> Tensor:
    """out = sqrt(x), correctly rounded, for f32 and f64 that need no gradient; returns `out`.

    On the CPU torch's own square root may come from a vector library that is off by one unit in the last place for some
    inputs (0.7 % of random ones, torch 2.13); numpy's is the processor's instruction, which IEEE 754 makes exact.
    """
    if x.device.type == "cpu":
        with np.errstate(invalid="ignore"):
            np.sqrt(x.numpy(), out=out.numpy())
        return out
    return torch.sqrt(x, out=out)
