"""The sum of the squares of a tensor, accumulated in fp64.

A square of an fp32 value is exact in fp64 and cannot overflow there, so finite inputs give a finite sum, and a
non-finite input gives a non-finite sum: one pass answers both "how long is the gradient" and "is it finite".
The order of the additions differs between implementations and cuts; for n elements the results agree to a relative
n * 2^-53, and round to the same fp32 norm except in ties of that width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trilithon.kernels.bits import load
from trilithon.kernels.chunks import chunks
from trilithon.kernels.compiled import Array, arrays, compiled

_LANES = 512  # running sums side by side: addition is not reassociated, so the loop has to say it


def sum_of_squares(x: Tensor) -> float:
    """x: any shape, contiguous, bf16, f16, f32 or f64; NaN or infinite if any element is."""
    operands = (x.detach().reshape(-1),)
    loop = compiled(sum_of_squares_loop, operands, ())
    return sum_of_squares_torch(x) if loop is None else float(loop(*arrays(operands)))


def sum_of_squares_loop(x: Array) -> float:
    """One pass, for `compiled`."""
    lanes = np.zeros(_LANES, np.float64)
    whole = x.shape[0] // _LANES * _LANES
    for start in range(0, whole, _LANES):
        for lane in range(_LANES):
            value = np.float64(load(x, start + lane))
            lanes[lane] += value * value
    total = 0.0
    for lane in range(_LANES):
        total += lanes[lane]
    for i in range(whole, x.shape[0]):
        value = np.float64(load(x, i))
        total += value * value
    return total


@torch.no_grad()
def sum_of_squares_torch(x: Tensor) -> float:
    """The plain torch twin. Reading the result from an accelerator waits for it."""
    flat = x.reshape(-1)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in chunks(flat):
        wide = flat[part].to(torch.float64)
        total.add_(torch.dot(wide, wide))
    return float(total)
