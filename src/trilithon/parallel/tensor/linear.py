"""Matrix products cut over tensor ranks: by columns (output features) and by rows (input features).

A column product followed by a row product needs one sum over ranks in forward (after the row) and one in backward
(before the column), each of B T D elements (Shoeybi et al. 2019, arXiv:1909.08053, section 3). With cut tokens the same
bytes move as an all-gather and a reduce-scatter, and what lies between the matrices is computed on 1/t of the tokens
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

Both wrap an existing layer and keep its very Parameter objects, so names, optimizer groups and ties stay. The exchange
of the input's gradient runs while the weight's gradient is computed.
"""

# X [..., T, D] input, W [F, D] weight as in nn.Linear

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trilithon.contracts import Collectives, Tag
from trilithon.parallel import regions
from trilithon.parallel.tensor.streams import SlicedStream


class Fan:
    """The way into several column products that read the same tensor (query, key and value): crossed once, not thrice.

    Holds the copy, or the gathered tokens, from the first of `readers` calls with one tensor to the last.
    """

    def __init__(self, group: Collectives, readers: int, tag: Tag, *, cut_tokens: bool) -> None:
        self._group, self._readers, self._tag, self._cut_tokens = group, readers, tag, cut_tokens
        self._source: Tensor | None = None
        self._copy: Tensor | None = None
        self._left = 0

    def enter(self, x: Tensor) -> Tensor:
        """x as the cut region reads it."""
        copy = self._copy
        if copy is None or self._source is not x or copy.requires_grad != (x.requires_grad and torch.is_grad_enabled()):
            if self._cut_tokens:
                copy = regions.gather(x, -2, self._group, self._tag)
            else:
                copy = regions.copy_in(x, self._group, self._tag)
            self._source, self._copy, self._left = x, copy, self._readers
        self._left -= 1
        if self._left == 0:
            self._source = self._copy = None
        return copy


class ColumnLinear(nn.Linear):
    """Y's own columns: each rank holds W [F/t, D] and, if there is one, its part of the bias.

    gather_output: the columns of all ranks are put side by side, `valid` of them (the rest is padding).
    """

    def __init__(
        self, layer: nn.Module, group: Collectives, name: str, *, cut_tokens: bool = False, gather_output: bool = False,
        transposed: bool = False,
    ) -> None:  # fmt: skip
        _adopt(self, layer, transposed)
        self._group, self._tag = group, Tag(name)
        self._cut_tokens, self._gather_output, self._transposed = cut_tokens, gather_output, transposed
        self.valid: int | None = None  # real columns of the whole output, when some are padding
        self.fan: Fan | None = None
        self.stream: SlicedStream | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, D] -> [..., T, F/t]; with cut tokens from [..., T/t, D]."""
        if self.fan is not None:
            y = F.linear(self.fan.enter(x), self._weight(), self.bias)
        else:
            y = _column(x, self._weight(), self.bias, self._group, self._tag, self._cut_tokens)
        if self._gather_output:
            y = regions.gather(y, -1, self._group, self._tag, same_after=True)
            y = y if self.valid is None else y[..., : self.valid]
        if self.stream is not None and self.training:
            self.stream.enter()
        return y

    def _weight(self) -> Tensor:
        return self.weight.t() if self._transposed else self.weight

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, column part {self._group.rank} of {self._group.world_size}"


class RowLinear(nn.Linear):
    """The sum over ranks of X_k W_k^T: each rank holds W [F, D/t] and reads its own columns of X. Bias added once."""

    def __init__(
        self, layer: nn.Module, group: Collectives, name: str, *, cut_tokens: bool = False, split_input: bool = False,
        transposed: bool = False,
    ) -> None:  # fmt: skip
        _adopt(self, layer, transposed)
        self._group, self._tag = group, Tag(name)
        self._cut_tokens, self._split_input, self._transposed = cut_tokens, split_input, transposed
        self.stream: SlicedStream | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, D/t] -> [..., T, F]; with cut tokens to [..., T/t, F]."""
        if self.stream is not None:
            self.stream.leave()
        if self._split_input:
            x = regions.own_part(x, -1, self._group, self._tag)
        weight = self.weight.t() if self._transposed else self.weight
        if self._cut_tokens:
            y = regions.scatter_sum(F.linear(x, weight), -2, self._group, self._tag)
        else:
            y = _row(x, weight, self._group, self._tag)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, row part {self._group.rank} of {self._group.world_size}"


def _adopt(new: nn.Linear, layer: nn.Module, transposed: bool) -> None:
    """The state of `layer` without nn.Linear's constructor, which would draw new weights."""
    nn.Module.__init__(new)
    new.weight, new.bias = layer.weight, getattr(layer, "bias", None)  # type: ignore[assignment]
    out_features, in_features = new.weight.shape[::-1] if transposed else new.weight.shape
    new.in_features, new.out_features = in_features, out_features
    new.training = layer.training


def _column(  # noqa: PLR0917 (as autograd functions are called)
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Collectives, tag: Tag, cut_tokens: bool
) -> Tensor:
    y: Tensor = _Column.apply(x, weight, bias, group, tag, cut_tokens)
    return y


def _row(x: Tensor, weight: Tensor, group: Collectives, tag: Tag) -> Tensor:
    y: Tensor = _Row.apply(x, weight, group, tag)
    return y


class _Column(torch.autograd.Function):
    """Backward launches the exchange of dX before it computes dW. The tokens gathered in forward are not kept."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Collectives, tag: Tag, cut_tokens: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.tag, ctx.cut_tokens, ctx.has_bias = group, tag, cut_tokens, bias is not None
        whole = regions.gathered(x, x.ndim - 2, group, tag) if cut_tokens else x
        y: Tensor = F.linear(whole, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        group, tag = ctx.group, ctx.tag
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        finish = None
        if ctx.cut_tokens:
            gather = regions.start_gather(x, x.ndim - 2, group, tag)
            if need_x:
                d_x = grad @ weight
            whole = gather()
            finish = regions.start_scatter(d_x, x.ndim - 2, group, tag) if need_x else None
        else:
            whole = x
            if need_x:
                d_x = (grad @ weight).contiguous()
                handle = group.all_reduce(d_x, tag)

                def finish() -> Any:
                    handle.wait()
                    return d_x

        flat = grad.flatten(0, -2)
        d_weight = flat.t() @ whole.flatten(0, -2) if need_weight else None
        d_bias = flat.sum(0) if ctx.has_bias and need_bias else None
        return finish() if finish is not None else None, d_weight, d_bias, None, None, None


class _Row(torch.autograd.Function):
    """The product and its sum over ranks in the product's own memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Collectives, tag: Tag) -> Tensor:
        ctx.save_for_backward(x, weight)
        return regions.product_sum(x, weight, group, tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        d_x = grad @ weight if ctx.needs_input_grad[0] else None
        d_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None, None
