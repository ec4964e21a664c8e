"""Update formulas as pure functions of flat tensors: what each rule does, apart from who holds which slice.

Every formula widens a low-precision gradient to the dtype of the masters, multiplies it by `grad_scale` (clip factor,
loss scale and averaging folded into one number), changes its state and p in place, and writes the low-precision copy
`low` in the same pass. Each uses only operations that round once, so results do not depend on how p is cut.
Against torch.optim, which may fuse a multiply with an add, one step differs by a few units in the last place of the
state and of the step: about 4 * 2^-24 relative, times the step's size in p, plus one rounding of p.

p and state: [n] f32 (or f64), contiguous; g, low: [n] bf16, f16, f32 or f64.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from trilithon.kernels import adam_step, lion_step, sgd_step
from trilithon.kernels.chunks import chunks, read_gradient_, scratch, square_root

adam_ = partial(adam_step, decoupled=False)
adam_.__doc__ = "Adam, decay added to the gradient (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1): `adam_step`."
adamw_ = partial(adam_step, decoupled=True)
adamw_.__doc__ = "AdamW, decoupled decay (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2): `adam_step`."
sgd_ = sgd_step
lion_ = lion_step


@torch.no_grad()
def adagrad_(
    p: Tensor,
    g: Tensor,
    sum_: Tensor,
    low: Tensor | None = None,
    *,
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    step: int,
    grad_scale: float = 1.0,
) -> None:
    """Adagrad (Duchi et al. 2011, "Adaptive subgradient methods", section 1.1, diagonal form), decay in the gradient.

    s = s + g * g;  p = p - g * (lr / (1 + (step - 1) * lr_decay)) / (sqrt(s) + eps);  step counts from 1.
    """
    step_size = lr / (1.0 + (step - 1) * lr_decay)
    first, second = scratch(p, 2)
    for part in chunks(p):
        size = part.stop - part.start
        grad, temp, w, s = first[:size], second[:size], p[part], sum_[part]
        read_gradient_(grad, g[part], grad_scale)
        if weight_decay != 0.0:
            grad.add_(torch.mul(w, weight_decay, out=temp))
        s.add_(torch.mul(grad, grad, out=temp))
        square_root(s, out=temp).add_(eps)
        w.sub_(grad.mul_(step_size).div_(temp))
        if low is not None:
            low[part].copy_(w)


@torch.no_grad()
def lamb_moments_(
    g: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, betas: tuple[float, float], grad_scale: float = 1.0
) -> None:
    """The first half of LAMB: m = m + (g - m) * (1 - beta1) and v = v * beta2 + g * g * (1 - beta2)."""
    beta1, beta2 = betas
    first, second = scratch(exp_avg, 2)
    for part in chunks(exp_avg):
        size = part.stop - part.start
        grad, temp, m, v = first[:size], second[:size], exp_avg[part], exp_avg_sq[part]
        read_gradient_(grad, g[part], grad_scale)
        torch.sub(grad, m, out=temp)
        m.add_(temp.mul_(1.0 - beta1))
        v.mul_(beta2).add_(grad.mul_(grad).mul_(1.0 - beta2))


@torch.no_grad()
def lamb_direction(
    out: Tensor,
    p: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool = True,
) -> Tensor:
    """out = (m / c1) / (sqrt(v) / sqrt(c2) + eps) + weight_decay * p, a pure function of the moments and of p.

    You et al. 2020, arXiv:1904.00962, algorithm 2, line 9. All tensors [n], small enough to stay in cache.
    """
    c1 = 1.0 - betas[0] ** step if bias_correction else 1.0
    c2 = 1.0 - betas[1] ** step if bias_correction else 1.0
    denominator = square_root(exp_avg_sq, out=torch.empty_like(exp_avg_sq)).mul_(c2**-0.5).add_(eps)
    torch.mul(exp_avg, 1.0 / c1, out=out)
    out.div_(denominator)
    if weight_decay != 0.0:
        out.add_(p * weight_decay)
    return out


def lamb_ratio(
    weight_squares: float, direction_squares: float, *, min_ratio: float = 0.0, max_ratio: float = float("inf")
) -> float:
    """The trust ratio |w| / |u|, clamped; 1 if either norm is 0. Norms are rounded to fp32 before they are divided.

    The rounding makes the ratio independent of the order in which ranks added their squares, up to ties.
    """
    weight, direction = _f32(weight_squares**0.5), _f32(direction_squares**0.5)
    if weight == 0.0 or direction == 0.0:
        return 1.0
    ratio = weight / direction
    return ratio if math.isnan(ratio) else min(max(ratio, min_ratio), max_ratio)


def _f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
