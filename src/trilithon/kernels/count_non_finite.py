"""How many elements of a tensor are NaN or infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from trilithon.kernels.bits import load
from trilithon.kernels.chunks import chunks
from trilithon.kernels.compiled import Array, arrays, compiled


def count_non_finite(x: Tensor) -> int:
    """x: any shape, contiguous, bf16, f16, f32 or f64."""
    operands = (x.detach().reshape(-1),)
    loop = compiled(count_non_finite_loop, operands, ())
    return count_non_finite_torch(x) if loop is None else int(loop(*arrays(operands)))


def count_non_finite_loop(x: Array) -> int:
    """One pass, for `compiled`. The difference of a number with itself is 0 unless it is NaN or infinite."""
    count = 0
    for i in range(x.shape[0]):
        value = load(x, i)
        count += 0 if value - value == 0.0 else 1
    return count


@torch.no_grad()
def count_non_finite_torch(x: Tensor) -> int:
    """The plain torch twin. Reading the result from an accelerator waits for it."""
    flat = x.reshape(-1)
    finite = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in chunks(flat):
        finite.add_(torch.isfinite(flat[part]).sum())
    return flat.numel() - int(finite)
