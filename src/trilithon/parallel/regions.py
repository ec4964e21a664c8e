"""Collectives that autograd can go through, between the regions in which a tensor is whole, cut or a part of a sum.

Each is a pair: what forward does is undone, transposed, by backward (Shoeybi et al. 2019, arXiv:1909.08053, section 3;
with cut tokens: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

    function      forward                  backward
    copy_in       -                        sum over ranks
    sum_out       sum over ranks           -
    gather        all-gather               reduce-scatter, or the own part when what follows is the same on all ranks
    scatter_sum   reduce-scatter           all-gather
    own_part      the own part             all-gather

`product_sum`, outside autograd, is the one that forgets its argument: a product and its sum over ranks in one memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from trilithon.contracts import Collectives, Tag
from trilithon.errors import ConfigError


def copy_in(x: Tensor, group: Collectives, tag: Tag) -> Tensor:
    """x, equal on all ranks, enters a region that is cut: the gradients of all ranks add up."""
    return x if group.world_size == 1 else _apply(_CopyIn, x, group, tag)


def sum_out(x: Tensor, group: Collectives, tag: Tag) -> Tensor:
    """x, a part of a sum, leaves a region that is cut: the sum over ranks, on every rank."""
    return x if group.world_size == 1 else _apply(_SumOut, x, group, tag)


def gather(x: Tensor, dim: int, group: Collectives, tag: Tag, *, same_after: bool = False) -> Tensor:
    """The parts of all ranks side by side along `dim`.

    same_after: what is computed from the result is the same on all ranks, so each keeps its part of the gradient.
    """
    return x if group.world_size == 1 else _apply(_Gather, x, dim % x.ndim, group, tag, same_after)


def scatter_sum(x: Tensor, dim: int, group: Collectives, tag: Tag) -> Tensor:
    """This rank's part along `dim` of the sum over ranks."""
    return x if group.world_size == 1 else _apply(_ScatterSum, x, dim % x.ndim, group, tag)


def own_part(x: Tensor, dim: int, group: Collectives, tag: Tag) -> Tensor:
    """This rank's part along `dim` of a tensor that all ranks have."""
    return x if group.world_size == 1 else _apply(_OwnPart, x, dim % x.ndim, group, tag)


def require_parts(size: int, parts: int, what: str) -> None:
    """Raises ConfigError, on every rank alike, when a dimension does not cut into equal parts."""
    if size % parts:
        below = size // parts * parts
        nearest = f"{below} or {below + parts}" if below else f"{parts}"
        raise ConfigError(
            f"{size} {what} do not split over {parts} ranks. Pad or cut to {nearest}, or use fewer ranks."
        )


def gathered(x: Tensor, dim: int, group: Collectives, tag: Tag) -> Tensor:
    """All-gather along `dim`, outside autograd."""
    return start_gather(x, dim, group, tag)()


def start_gather(x: Tensor, dim: int, group: Collectives, tag: Tag) -> Callable[[], Tensor]:
    """Begin an all-gather along `dim`; the function returned waits and gives the result."""
    full = x.new_empty((group.world_size, *x.shape))
    handle = group.all_gather(full.view(-1), x.contiguous().view(-1), tag)

    def finish() -> Tensor:
        handle.wait()
        return full.movedim(0, dim).flatten(dim, dim + 1)

    return finish


def start_scatter(x: Tensor, dim: int, group: Collectives, tag: Tag) -> Callable[[], Tensor]:
    """Begin a reduce-scatter along `dim`; the function returned waits and gives this rank's part of the sum."""
    require_parts(x.shape[dim], group.world_size, "tokens" if dim == x.ndim - 2 else "elements")
    parts = x.unflatten(dim, (group.world_size, -1)).movedim(dim, 0).contiguous()
    out = x.new_empty(parts.shape[1:])
    handle = group.reduce_scatter(parts.view(-1), out.view(-1), tag)

    def finish() -> Tensor:
        handle.wait()
        return out

    return finish


def part(x: Tensor, dim: int, group: Collectives) -> Tensor:
    """This rank's part along `dim`, outside autograd."""
    require_parts(x.shape[dim], group.world_size, "tokens" if dim == x.ndim - 2 else "elements")
    size = x.shape[dim] // group.world_size
    return x.narrow(dim, group.rank * size, size).contiguous()


def summed(x: Tensor, group: Collectives, tag: Tag) -> Tensor:
    """The sum over ranks, outside autograd; x itself stays as it is."""
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total, tag).wait()
    return total


# Who watches operators may hold on to their results (recomputation that keeps some of them). A product whose memory the
# sum over ranks then writes to must not be seen by itself, so to them product and sum are one operator.
_library = torch.library.Library("trilithon", "DEF")
_library.define("product_sum(Tensor x, Tensor weight, int call) -> Tensor")
_calls = itertools.count()
_open: dict[int, tuple[Collectives, Tag]] = {}


def product_sum(x: Tensor, weight: Tensor, group: Collectives, tag: Tag) -> Tensor:
    """x [..., D], weight [F, D] -> the sum over ranks of their x weight^T [..., F], outside autograd."""
    if not is_in_torch_dispatch_mode(include_infra_modes=False):
        return _product_sum(x, weight, group, tag)
    call = next(_calls)
    _open[call] = group, tag
    try:
        result: Tensor = torch.ops.trilithon.product_sum(x, weight, call)
    finally:
        del _open[call]
    return result


def _product_sum(x: Tensor, weight: Tensor, group: Collectives, tag: Tag) -> Tensor:
    y: Tensor = F.linear(x, weight).contiguous()
    group.all_reduce(y, tag).wait()
    return y


@torch.library.impl(_library, "product_sum", "CompositeExplicitAutograd")
def _product_sum_of(x: Tensor, weight: Tensor, call: int) -> Tensor:
    return _product_sum(x, weight, *_open[call])


def _apply(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collectives, tag: Tag) -> Tensor:
        ctx.group, ctx.tag = group, tag
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed(grad, ctx.group, ctx.tag), None, None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collectives, tag: Tag) -> Tensor:
        return summed(x, group, tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (called by autograd)
        ctx: Any, x: Tensor, dim: int, group: Collectives, tag: Tag, same_after: bool
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.tag, ctx.same_after = dim, group, tag, same_after
        return gathered(x, dim, group, tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.same_after:
            return part(grad, ctx.dim, ctx.group), None, None, None, None
        return start_scatter(grad, ctx.dim, ctx.group, ctx.tag)(), None, None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Collectives, tag: Tag) -> Tensor:
        ctx.dim, ctx.group, ctx.tag = dim, group, tag
        return start_scatter(x, dim, group, tag)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gathered(grad, ctx.dim, ctx.group, ctx.tag), None, None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Collectives, tag: Tag) -> Tensor:
        ctx.dim, ctx.group, ctx.tag = dim, group, tag
        return part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gathered(grad, ctx.dim, ctx.group, ctx.tag), None, None, None
