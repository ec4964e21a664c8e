"""What `param.grad` shows while an engine holds the gradient: a stand-in that refuses to be used, by name.

Gradients of an engine are reduced over ranks and perhaps sharded, so they are not in `param.grad`. Were it None there,
`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`, the `step` of another optimizer and a hand-written norm would
all do nothing and say nothing. The stand-in has the shape and type of the gradient, holds one element, and raises
ProtocolError when a value is asked for. It is there from the end of a backward to the next forward, backward or step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trilithon.errors import ProtocolError

_RESETS = ("zero_", "detach_", "requires_grad_")  # what zero_grad(set_to_none=False) calls; there is nothing to reset
_READABLE = ("shape", "dtype", "device", "is_sparse", "requires_grad", "grad_fn", "ndim", "layout", "is_cuda")
_PLAIN = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, Tensor.__hash__)


class HeldGradient(Tensor):
    """The stand-in of one gradient. Its metadata can be read."""

    held_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if func in _PLAIN or (name == "__get__" and _property(func) in _READABLE):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in _RESETS:
            return args[0]
        held = next((one for one in _flat([*args, *(kwargs or {}).values()]) if isinstance(one, HeldGradient)), None)
        raise ProtocolError(
            f"the gradient of '{held.held_name if held is not None else '?'}' is held by an engine, reduced over ranks "
            f"and perhaps sharded, and is not in param.grad (asked for by {name}). To clip, set clip_norm in the "
            "configuration; the norm is engine.grad_norm after engine.step(), a gradient is "
            "dict(engine.view('grad'))[name], and the update is engine.step()."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HeldGradient('{self.held_name}', shape={tuple(self.shape)}, dtype={self.dtype})"


def _property(func: Callable[..., Any]) -> str:
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _flat(values: Sequence[Any]) -> list[Any]:
    return [item for value in values for item in (_flat(value) if isinstance(value, list | tuple) else [value])]


class HeldGradients:
    """Puts the stand-ins of one engine in place and takes them away."""

    def __init__(self, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._params = list(params)
        self._stand_ins: list[HeldGradient] = []
        self._shown = False
        self._offered: list[tuple[nn.Parameter, Tensor]] = []
        _LIVE.add(self)

    def show(self) -> None:
        """Backward is over."""
        if not self._stand_ins:
            self._stand_ins = [_stand_in(name, param) for name, param in self._params]
        with torch._C.DisableTorchFunctionSubclass():  # parameters may be sharded
            for (_, param), stand_in in zip(self._params, self._stand_ins, strict=True):
                param.grad = stand_in
        self._shown, self._offered = True, []

    def offer(self, places: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Until `show` or `hide`, autograd adds to these sums of earlier backwards by itself: they are param.grad."""
        self._offered = list(places)
        for param, place in self._offered:
            param.grad = place

    def hide(self) -> None:
        """Gradients may arrive again."""
        for param, place in self._offered:
            if param.grad is place:
                param.grad = None
        self._offered = []
        if not self._shown:
            return
        self._shown = False
        with torch._C.DisableTorchFunctionSubclass():
            for _, param in self._params:
                if isinstance(param.grad, HeldGradient):
                    param.grad = None


def hide_all() -> None:
    """Before any engine's backward: it may run through the parameters of others."""
    for one in list(_LIVE):
        one.hide()


_LIVE: weakref.WeakSet[HeldGradients] = weakref.WeakSet()


def _stand_in(name: str, param: nn.Parameter) -> HeldGradient:
    with torch._C.DisableTorchFunctionSubclass():
        one = torch.full((), float("nan"), dtype=param.dtype, device=param.device)
        made = one.expand(param.shape).as_subclass(HeldGradient)
        made.held_name = name
        return made
