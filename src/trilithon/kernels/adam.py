"""One step of Adam or AdamW over a flat tensor, with gradient scaling and the low-precision copy in the same pass.

Adam: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1.
AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.

Every implementation does these operations in this order, each rounded once to the dtype of the masters, with no fused
multiply-add, so that all of them agree bit for bit and none depends on how a tensor is cut or aligned:

    g = widen(gradient) * grad_scale
    p = p * (1 - lr * weight_decay)                 decoupled decay (AdamW)
    g = g + p * weight_decay                        otherwise (Adam)
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + (g * g) * (1 - beta2)
    p = p - (m * (lr / c1)) / (sqrt(v) * (1 / sqrt(c2)) + eps)      c1 = 1 - beta1^step, c2 = 1 - beta2^step
    low = round(p)
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from trilithon.kernels.bits import load, root, store
from trilithon.kernels.chunks import chunks, read_gradient_, scratch, square_root
from trilithon.kernels.compiled import Array, arrays, compiled
from trilithon.kernels.threads import spread


class AdamScalars(NamedTuple):
    """What one step multiplies with, computed once in double precision and rounded where it is used."""

    grad_scale: float
    keep: float  # factor on p before the step: 1 - lr * weight_decay if decoupled, else 1
    decay: float  # factor of p added to the gradient: weight_decay if not decoupled, else 0
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float  # lr / c1
    inv_sqrt_c2: float
    eps: float


def adam_scalars(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: int,
    second_step: int | None = None,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
) -> AdamScalars:
    """step: counted from 1, the number of this update; second_step: that of the second moment, if it has others."""
    beta1, beta2 = betas
    c1 = 1.0 - beta1**step if bias_correction else 1.0
    c2 = 1.0 - beta2 ** (step if second_step is None else second_step) if bias_correction else 1.0
    return AdamScalars(
        grad_scale=grad_scale,
        keep=1.0 - lr * weight_decay if decoupled else 1.0,
        decay=0.0 if decoupled else weight_decay,
        one_minus_beta1=1.0 - beta1,
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        step_size=lr / c1,
        inv_sqrt_c2=c2**-0.5,
        eps=eps,
    )


def adam_step(
    p: Tensor,
    g: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    step: int,
    second_step: int | None = None,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
) -> None:
    """Update p, exp_avg and exp_avg_sq in place and write p, rounded to nearest even, to `low`.

    p, exp_avg, exp_avg_sq: [n] f32 (or f64), contiguous; g: [n] bf16, f16, f32 or f64; low: [n] of any of them.
    step: the number of this update, counted from 1 (second_step: of the second moment's, if it has others).
    `grad_scale` multiplies the gradient after it was widened.
    """
    scalars = adam_scalars(
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        step=step,
        second_step=second_step,
        bias_correction=bias_correction,
        grad_scale=grad_scale,
    )
    operands = (p, g, exp_avg, exp_avg_sq, low)
    if os.environ.get("TRILITHON_KERNELS") == "triton" and p.dtype is torch.float32:
        from trilithon.kernels.adam_triton import adam_step_triton

        adam_step_triton(p, g, exp_avg, exp_avg_sq, low, scalars=scalars)
        return
    loop = compiled(adam_loop, operands, scalars)
    if loop is None:
        adam_step_torch(p, g, exp_avg, exp_avg_sq, low, scalars=scalars)
    else:
        spread(loop, arrays(operands), scalars)


def adam_loop(  # noqa: PLR0917 - compiled loops take their arguments by position
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    low: Array | None,
    grad_scale: float,
    keep: float,
    decay: float,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    step_size: float,
    inv_sqrt_c2: float,
    eps: float,
) -> None:
    """One pass, for `compiled`. The scalars are those of `AdamScalars`, in order."""
    for i in range(p.shape[0]):
        weight = p[i] * keep
        grad = load(g, i) * grad_scale
        if decay != 0.0:
            grad = grad + weight * decay
        m[i] = first = m[i] + (grad - m[i]) * one_minus_beta1
        v[i] = second = v[i] * beta2 + (grad * grad) * one_minus_beta2
        weight = weight - (first * step_size) / (root(second) * inv_sqrt_c2 + eps)
        p[i] = weight
        if low is not None:
            store(low, i, weight)


@torch.no_grad()
def adam_step_torch(
    p: Tensor, g: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, low: Tensor | None, *, scalars: AdamScalars
) -> None:
    """The plain torch twin: any device, any floating dtype of masters."""
    s = scalars
    first, second = scratch(p, 2)
    for part in chunks(p):
        size = part.stop - part.start
        grad, temp, w, m, v = first[:size], second[:size], p[part], exp_avg[part], exp_avg_sq[part]
        read_gradient_(grad, g[part], s.grad_scale)
        if s.keep != 1.0:
            w.mul_(s.keep)
        if s.decay != 0.0:
            grad.add_(torch.mul(w, s.decay, out=temp))
        torch.sub(grad, m, out=temp)
        m.add_(temp.mul_(s.one_minus_beta1))
        v.mul_(s.beta2).add_(grad.mul_(grad).mul_(s.one_minus_beta2))
        square_root(v, out=grad).mul_(s.inv_sqrt_c2).add_(s.eps)
        torch.mul(m, s.step_size, out=temp)
        w.sub_(temp.div_(grad))
        if low is not None:
            low[part].copy_(w)
