"""One step of stochastic gradient descent with momentum over a flat tensor, low-precision copy included.

Momentum as in Sutskever et al. 2013 ("On the importance of initialization and momentum in deep learning", section 2),
with the learning rate outside the buffer, as torch has it. Operations, each rounded once, none fused:

    g = widen(gradient) * grad_scale
    g = g + p * weight_decay
    b = g                                   first step
    b = b * momentum + g * (1 - dampening)  later steps
    d = g + b * momentum if nesterov else b (g without momentum)
    p = p - d * lr
    low = round(p)
"""

from __future__ import annotations

import torch
from torch import Tensor

from trilithon.kernels.bits import load, store
from trilithon.kernels.chunks import chunks, read_gradient_, scratch
from trilithon.kernels.compiled import Array, arrays, compiled
from trilithon.kernels.threads import spread


def sgd_step(
    p: Tensor,
    g: Tensor,
    momentum_buffer: Tensor | None,
    low: Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    first: bool = False,
    grad_scale: float = 1.0,
) -> None:
    """Update p and momentum_buffer in place and write p, rounded to nearest even, to `low`.

    p: [n] f32 (or f64), contiguous; momentum_buffer: like p, or None for plain descent; g and low: [n] floating.
    first: this is the first step that uses the buffer, which then becomes the gradient itself, undamped.
    """
    operands = (p, g, momentum_buffer, low)
    scalars = (lr, momentum, 1.0 - dampening, nesterov, weight_decay, first, grad_scale)
    loop = compiled(sgd_loop, operands, scalars)
    if loop is not None:
        spread(loop, arrays(operands), scalars)
        return
    sgd_step_torch(
        p,
        g,
        momentum_buffer,
        low,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=weight_decay,
        first=first,
        grad_scale=grad_scale,
    )


def sgd_loop(  # noqa: PLR0917 - compiled loops take their arguments by position
    p: Array,
    g: Array,
    buffer: Array | None,
    low: Array | None,
    lr: float,
    momentum: float,
    one_minus_dampening: float,
    nesterov: bool,
    weight_decay: float,
    first: bool,
    grad_scale: float,
) -> None:
    """One pass, for `compiled`."""
    for i in range(p.shape[0]):
        grad = load(g, i) * grad_scale
        weight = p[i]
        if weight_decay != 0.0:
            grad = grad + weight * weight_decay
        direction = grad
        if buffer is not None:
            moved = grad if first else buffer[i] * momentum + grad * one_minus_dampening
            buffer[i] = moved
            direction = grad + moved * momentum if nesterov else moved
        weight = weight - direction * lr
        p[i] = weight
        if low is not None:
            store(low, i, weight)


@torch.no_grad()
def sgd_step_torch(
    p: Tensor,
    g: Tensor,
    momentum_buffer: Tensor | None,
    low: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    first: bool,
    grad_scale: float,
) -> None:
    """The plain torch twin: any device, any floating dtype of masters."""
    gradient, temp_ = scratch(p, 2)
    for part in chunks(p):
        size = part.stop - part.start
        grad, temp, w = gradient[:size], temp_[:size], p[part]
        read_gradient_(grad, g[part], grad_scale)
        if weight_decay != 0.0:
            grad.add_(torch.mul(w, weight_decay, out=temp))
        if momentum_buffer is not None:
            b = momentum_buffer[part]
            if first:
                b.copy_(grad)
            else:
                b.mul_(momentum).add_(torch.mul(grad, 1.0 - dampening, out=temp))
            if nesterov:
                grad.add_(torch.mul(b, momentum, out=temp))
            else:
                grad.copy_(b)
        w.sub_(grad.mul_(lr))
        if low is not None:
            low[part].copy_(w)
