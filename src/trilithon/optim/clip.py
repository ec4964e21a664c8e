"""The norm of the gradient over all ranks, the factor that clips it, and which parameter broke it.

Clipping by global norm: Pascanu et al. 2013, arXiv:1211.5063, section 3.2, with the factor of torch's clip_grad_norm_.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trilithon.contracts import Slice
from trilithon.kernels import count_non_finite, sum_of_squares


def squared_norm(slices: Sequence[Slice], device: torch.device | str = "cpu") -> Tensor:
    """The sum of squares of this rank's gradients as stored, loss scale included: [1] f64.

    Not finite if and only if a gradient is not finite. The ranks add theirs up with ReduceOp.SUM, on `device`.
    """
    total = sum(sum_of_squares(slice_.grad) for slice_ in slices)
    return torch.tensor([total], dtype=torch.float64, device=device)


def agreed_norm(total_squares: Tensor, scale: float = 1.0) -> float:
    """The norm in fp32 of gradients that carry the factor `scale`, from the squares of all ranks ([1] f64).

    Rounding to fp32 makes the norm, and with it the clip factor, independent of how the squares were added, up to ties.
    """
    with np.errstate(over="ignore"):  # a finite norm beyond fp32 becomes infinite, and its clip factor 0
        return float(np.float32(math.sqrt(float(total_squares)) / scale))


def clip_factor(norm: float, max_norm: float) -> float:
    """1 / max(1, (norm + 1e-6) / max_norm) in fp32 arithmetic; 1 if max_norm is 0 (off). NaN if the norm is NaN."""
    if max_norm <= 0.0:
        return 1.0
    factor = np.float32(max_norm) * (np.float32(1.0) / (np.float32(norm) + np.float32(1e-6)))
    return float(factor) if math.isnan(norm) else float(min(factor, np.float32(1.0)))


def first_non_finite(slices: Sequence[Slice]) -> str | None:
    """The name of the first parameter here whose gradient has a NaN or an infinity; None if there is none."""
    for slice_ in slices:
        for shard in slice_.shards:
            if count_non_finite(slice_.grad[shard.offset : shard.offset + shard.numel]):
                return shard.name
    return None
