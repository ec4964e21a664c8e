"""How many elements of a tensor are NaN or infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from trilithon.kernels.chunks import chunks


def count_non_finite(x: Tensor) -> int:
    """x: any shape, contiguous, bf16, f16, f32 or f64."""
    return count_non_finite_torch(x)


@torch.no_grad()
def count_non_finite_torch(x: Tensor) -> int:
    """The plain torch twin. Reading the result from an accelerator waits for it."""
    flat = x.reshape(-1)
    finite = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in chunks(flat):
        finite.add_(torch.isfinite(flat[part]).sum())
    return flat.numel() - int(finite)
