"""One step along a momentum that is already known, under a fixed diagonal preconditioner, in one pass over memory.

Adam with a frozen second moment (Tang et al. 2021, "1-bit Adam", arXiv:2102.02888, algorithm 1, line 13). The same
operations in the same order as the last lines of `adam_step`, each rounded once:

    p = p * (1 - lr * weight_decay)
    p = p - (m * (lr / c1)) / (sqrt(v) * (1 / sqrt(c2)) + eps)
    low = round(p)
"""

from __future__ import annotations

import torch
from torch import Tensor

from trilithon.kernels.bits import root, store
from trilithon.kernels.chunks import chunks, scratch, square_root
from trilithon.kernels.compiled import Array, arrays, compiled
from trilithon.kernels.threads import spread


def preconditioned_step(
    p: Tensor, m: Tensor, v: Tensor, low: Tensor | None = None, *, keep: float, step_size: float, inv_sqrt_c2: float,
    eps: float,
) -> None:  # fmt: skip
    """Update p [n] in place along m [n] under v [n], all f32 (or f64), and write p to low [n] of any floating type.

    keep: 1 - lr * weight_decay; step_size: lr / c1.
    """
    operands = (p, m, v, low)
    scalars = (keep, step_size, inv_sqrt_c2, eps)
    loop = compiled(preconditioned_loop, operands, scalars)
    if loop is None:
        preconditioned_torch(p, m, v, low, scalars)
    else:
        spread(loop, arrays(operands), scalars)


def preconditioned_loop(  # noqa: PLR0917 - compiled loops take their arguments by position
    p: Array, m: Array, v: Array, low: Array | None, keep: float, step_size: float, inv_sqrt_c2: float, eps: float
) -> None:
    """One pass, for `compiled`."""
    for i in range(p.shape[0]):
        weight = p[i] * keep
        weight = weight - (m[i] * step_size) / (root(v[i]) * inv_sqrt_c2 + eps)
        p[i] = weight
        if low is not None:
            store(low, i, weight)


@torch.no_grad()
def preconditioned_torch(
    p: Tensor, m: Tensor, v: Tensor, low: Tensor | None, scalars: tuple[float, float, float, float]
) -> None:
    """The plain torch twin: any device, any floating dtype of masters."""
    keep, step_size, inv_sqrt_c2, eps = scalars
    first, second = scratch(p, 2)
    for part in chunks(p):
        size = part.stop - part.start
        bottom, step, weight = first[:size], second[:size], p[part]
        if keep != 1.0:
            weight.mul_(keep)
        square_root(v[part], out=bottom).mul_(inv_sqrt_c2).add_(eps)
        torch.mul(m[part], step_size, out=step)
        weight.sub_(step.div_(bottom))
        if low is not None:
            low[part].copy_(weight)
