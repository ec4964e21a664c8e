"""Feed-forward experts over rows that stand expert by expert: one matrix product per expert, into one buffer.

Written as one autograd function, since the parts are so many: outputs, and in backward the gradients of the stacked
weights, go straight to their place, where a list of results would have to be copied together, and the activation runs
once over all rows. Sums are those of `Form.run` for each expert, term by term.
"""

# N rows, M width, F inner width, E experts here

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trilithon.parallel.moe.forms import ACTIVATIONS, Form

_aten: Any = torch.ops.aten


def _squared_relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return grad * F.relu(x).mul_(2)


def _quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    share = torch.sigmoid(1.702 * x)
    return grad * (share + 1.702 * x * share * (1 - share))


def _tanh_backward(grad: Tensor, x: Tensor) -> Tensor:
    out: Tensor = _aten.tanh_backward(grad, torch.tanh(x))
    return out


def _sigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    out: Tensor = _aten.sigmoid_backward(grad, torch.sigmoid(x))
    return out


BACKWARD: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": _aten.gelu_backward,
    "relu": lambda grad, x: _aten.threshold_backward(grad, x, 0),
    "silu": _aten.silu_backward,
    "gelu_tanh": lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
    "quick_gelu": _quick_gelu_backward,
    "squared_relu": _squared_relu_backward,
    "tanh": _tanh_backward,
    "sigmoid": _sigmoid_backward,
}
"""(gradient of the output, input) -> gradient of the input, for each of `forms.ACTIVATIONS`."""


def run(x_NM: Tensor, counts: Sequence[int], form: Form, weights: Mapping[str, Tensor]) -> Tensor:
    """[N, M] -> [N, M]. counts: rows of each expert, in order; weights: stacked [E, ...], by the names of `form`."""
    of = {"up": form.up, "down": form.down, "gate": form.gate}
    tensors = [
        weights.get(f"{name}.{leaf}") if name is not None else None
        for name in of.values()
        for leaf in ("weight", "bias")
    ]
    out: Tensor = _Blocks.apply(x_NM, tuple(counts), form.activation, *tensors)
    return out


def can_run(x: Tensor, weights: Mapping[str, Tensor]) -> bool:
    """One type throughout, and nothing that would change it on the way."""
    same = all(weight.dtype == x.dtype for weight in weights.values())
    return same and not torch.is_autocast_enabled(x.device.type)


def _linear(x: Tensor, counts: Sequence[int], weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N, in], [E, out, in], [E, out] -> [N, out]."""
    out = x.new_empty(len(x), weight.shape[1])
    start = 0
    for index, count in enumerate(counts):
        rows = slice(start, start + count)
        if bias is None:
            torch.mm(x[rows], weight[index].t(), out=out[rows])
        else:
            torch.addmm(bias[index], x[rows], weight[index].t(), out=out[rows])
        start += count
    return out


def _linear_backward(
    grad: Tensor, x: Tensor, counts: Sequence[int], weight: Tensor, needed: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias, those that are needed."""
    grad_x = torch.empty_like(x) if needed[0] else None
    grad_w = torch.empty_like(weight) if needed[1] else None
    grad_b = weight.new_empty(weight.shape[:2]) if needed[2] else None
    start = 0
    for index, count in enumerate(counts):
        rows = slice(start, start + count)
        if grad_x is not None:
            torch.mm(grad[rows], weight[index], out=grad_x[rows])
        if grad_w is not None:
            torch.mm(grad[rows].t(), x[rows], out=grad_w[index])
        if grad_b is not None:
            torch.sum(grad[rows], 0, out=grad_b[index])
        start += count
    return grad_x, grad_w, grad_b


class _Blocks(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any, x: Tensor, counts: tuple[int, ...], activation: str, up_w: Tensor, up_b: Tensor | None,
        down_w: Tensor, down_b: Tensor | None, gate_w: Tensor | None, gate_b: Tensor | None,
    ) -> Tensor:  # fmt: skip
        act = ACTIVATIONS[activation]
        up = _linear(x, counts, up_w, up_b)
        gate = None if gate_w is None else _linear(x, counts, gate_w, gate_b)
        inner = act(up) if gate is None else act(gate).mul_(up)
        ctx.counts, ctx.activation = counts, activation
        ctx.save_for_backward(x, up, gate, inner, up_w, down_w, gate_w)
        return _linear(inner, counts, down_w, down_b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, up, gate, inner, up_w, down_w, gate_w = ctx.saved_tensors
        counts, needs, back = ctx.counts, ctx.needs_input_grad, BACKWARD[ctx.activation]
        below = needs[0] or any(needs[index] for index in (3, 4, 7, 8))
        grad_inner, grad_dw, grad_db = _linear_backward(
            grad.contiguous(), inner, counts, down_w, (below, needs[5], needs[6])
        )
        grad_x = grad_uw = grad_ub = grad_gw = grad_gb = None
        if grad_inner is not None and gate is None:
            grad_up = back(grad_inner, up)
            grad_x, grad_uw, grad_ub = _linear_backward(grad_up, x, counts, up_w, (needs[0], needs[3], needs[4]))
        elif grad_inner is not None:
            grad_gate = back(grad_inner * up, gate)
            grad_up = grad_inner.mul_(ACTIVATIONS[ctx.activation](gate))
            grad_x, grad_uw, grad_ub = _linear_backward(grad_up, x, counts, up_w, (needs[0], needs[3], needs[4]))
            more, grad_gw, grad_gb = _linear_backward(grad_gate, x, counts, gate_w, (needs[0], needs[7], needs[8]))
            grad_x = grad_x.add_(more) if grad_x is not None and more is not None else None
        return grad_x, None, None, grad_uw, grad_ub, grad_dw, grad_db, grad_gw, grad_gb
