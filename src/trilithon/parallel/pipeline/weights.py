"""Backward in two parts: the gradient of a layer's input now, those of its weights later.

Only products are split (`torch.nn.Linear`): they are where the time goes, and other layers make both gradients in one.
(Qi et al. 2024, arXiv:2401.10241, section 2.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_OPEN: list[WeightGradients] = []  # who takes the work that backward puts off; innermost last


class WeightGradients:
    """What one backward left to be done: [(weight, bias, input, gradient of the output)]."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Tensor | None, Tensor, Tensor]] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Split layers whose backward runs inside leave their weights to `compute`."""
        _OPEN.append(self)
        try:
            yield
        finally:
            _OPEN.remove(self)

    def add(self, weight: Tensor, bias: Tensor | None, x: Tensor, grad: Tensor) -> None:
        self._waiting.append((weight, bias, x, grad))

    def compute(self) -> None:
        """Make the gradients and hand them to autograd, so that they arrive as any other."""
        params: list[Tensor] = []
        grads: list[Tensor] = []
        for weight, bias, x, grad in self._waiting:
            for param, made in _weight_gradients(weight, bias, x, grad):
                params.append(param)
                grads.append(made)
        self._waiting.clear()
        if not params:
            return
        with torch.enable_grad():
            torch.autograd.backward([param.view_as(param) for param in params], grads)


def _weight_gradients(weight: Tensor, bias: Tensor | None, x: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows, columns = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    if weight.requires_grad:
        yield weight, rows.T @ columns
    if bias is not None and bias.requires_grad:
        yield bias, rows.sum(0)


class _SplitLinear(torch.autograd.Function):
    """x W^T + b, whose backward may leave the gradients of W and b to whoever is open."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: nn.Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module  # whose parameters the gradients are for: recomputation saves other tensors
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        module: nn.Linear = ctx.module
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if _OPEN:
            _OPEN[-1].add(module.weight, module.bias, x, grad)
            return grad_x, None, None, None
        made = {id(param): value for param, value in _weight_gradients(module.weight, module.bias, x, grad)}
        return grad_x, made.get(id(module.weight)), made.get(id(module.bias)), None


def split_linears(model: nn.Module) -> Callable[[], None]:
    """From now on the model's linear layers can be split; the function returned undoes it."""
    split = [module for module in model.modules() if isinstance(module, nn.Linear) and _is_plain(module)]
    for module in split:
        object.__setattr__(module, "forward", _forward_of(module))

    def undo() -> None:
        for module in split:
            vars(module).pop("forward", None)

    return undo


def _is_plain(module: nn.Linear) -> bool:
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def _forward_of(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, module.weight, module.bias)
        out: Tensor = _SplitLinear.apply(x, module.weight, module.bias, module)
        return out

    return forward
