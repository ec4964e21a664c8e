"""One step of Lion over a flat tensor, low-precision copy included.

Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv:2302.06675, algorithm 2. Operations, each
rounded once, none fused:

    g = widen(gradient) * grad_scale
    p = p * (1 - lr * weight_decay)
    u = m * beta1 + g * (1 - beta1)
    p = p - sign(u) * lr                    sign(0) is 0; sign(NaN) is NaN
    m = m + (g - m) * (1 - beta2)
    low = round(p)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trilithon.kernels.bits import load, store
from trilithon.kernels.chunks import chunks, read_gradient_, scratch
from trilithon.kernels.compiled import Array, arrays, compiled
from trilithon.kernels.threads import spread


def lion_step(
    p: Tensor,
    g: Tensor,
    exp_avg: Tensor,
    low: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
) -> None:
    """Update p and exp_avg in place and write p, rounded to nearest even, to `low`.

    p, exp_avg: [n] f32 (or f64), contiguous; g and low: [n] floating.
    """
    operands = (p, g, exp_avg, low)
    scalars = (lr, 1.0 - lr * weight_decay, betas[0], 1.0 - betas[0], 1.0 - betas[1], grad_scale)
    loop = compiled(lion_loop, operands, scalars)
    if loop is None:
        lion_step_torch(p, g, exp_avg, low, lr=lr, betas=betas, weight_decay=weight_decay, grad_scale=grad_scale)
    else:
        spread(loop, arrays(operands), scalars)


def lion_loop(  # noqa: PLR0917 - compiled loops take their arguments by position
    p: Array,
    g: Array,
    m: Array,
    low: Array | None,
    lr: float,
    keep: float,
    beta1: float,
    one_minus_beta1: float,
    one_minus_beta2: float,
    grad_scale: float,
) -> None:
    """One pass, for `compiled`."""
    for i in range(p.shape[0]):
        grad = load(g, i) * grad_scale
        weight = p[i] * keep
        u = m[i] * beta1 + grad * one_minus_beta1
        sign = np.float32(1.0) if u > 0.0 else (np.float32(-1.0) if u < 0.0 else (np.float32(0.0) if u == 0.0 else u))
        weight = weight - sign * lr
        m[i] = m[i] + (grad - m[i]) * one_minus_beta2
        p[i] = weight
        if low is not None:
            store(low, i, weight)


@torch.no_grad()
def lion_step_torch(
    p: Tensor,
    g: Tensor,
    exp_avg: Tensor,
    low: Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    grad_scale: float,
) -> None:
    """The plain torch twin: any device, any floating dtype of masters."""
    beta1, beta2 = betas
    keep = 1.0 - lr * weight_decay
    gradient, first, second = scratch(p, 3)
    for part in chunks(p):
        size = part.stop - part.start
        grad, u, temp, w, m = gradient[:size], first[:size], second[:size], p[part], exp_avg[part]
        read_gradient_(grad, g[part], grad_scale)
        if keep != 1.0:
            w.mul_(keep)
        torch.mul(m, beta1, out=u)
        u.add_(torch.mul(grad, 1.0 - beta1, out=temp))
        nan = u.isnan()  # torch's sign maps NaN to 0; a NaN must not pass for "no change"
        w.sub_(u.sign_().masked_fill_(nan, float("nan")).mul_(lr))
        m.add_(grad.sub_(m).mul_(1.0 - beta2))
        if low is not None:
            low[part].copy_(w)
