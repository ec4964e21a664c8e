"""Moving tokens to rows grouped by expert and back, by tables of indices.

`Rows` says which token and choice each row holds, and its inverse which row each choice went to, so that both
directions of both movements are gathers: memory is linear in tokens, the order of sums is fixed, and no mask of size
tokens x experts x capacity exists. Rows of a layout with capacity have a fixed number per expert, some of them empty;
those of a dropless one follow each other without gaps.
(What the masks of Lepikhin et al. 2020, arXiv:2006.16668, algorithm 1, compute; as tables: Rajbhandari et al. 2022,
arXiv:2201.05596, section 5.4.)
"""

# S tokens, E experts, K choices per token, M width, C slots per expert, N rows

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trilithon.parallel.moe.gate import Choice

_CACHED_ROWS = 128  # of a few hundred to a few thousand numbers each


@dataclass(frozen=True, eq=False, slots=True)
class Lookup:
    """Rows to take from a table, some of which are nowhere. index: [n], 0 there; missing: where, as positions or, on a
    device that would have to be asked how many, as a mask [n, 1]; None if all are somewhere."""

    index: Tensor
    missing: Tensor | None

    @staticmethod
    def of(index: Tensor, *, complete: bool) -> Lookup:
        """index: [n], -1 for nowhere. complete: none is."""
        if complete:
            return Lookup(index, None)
        nowhere = index < 0
        return Lookup(index.clamp(min=0), nowhere.unsqueeze(1) if index.is_cuda else nowhere.nonzero().view(-1))

    def take(self, values: Tensor) -> Tensor:
        """values: [m, M] -> [n, M], zeros for what is nowhere."""
        if values.shape[0] == 0:
            return values.new_zeros(self.index.numel(), values.shape[1])
        found = values.index_select(0, self.index)
        if self.missing is None:
            return found
        return (
            found.masked_fill_(self.missing, 0.0) if self.missing.dim() > 1 else found.index_fill_(0, self.missing, 0)
        )


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """slot_of: [S, K] row of each choice, -1 if dropped; source: [N] index s * K + j of the choice in a row, -1 if the
    row is empty; per_expert: rows of each expert when that number is fixed, else None; choice: kept while a graph that
    uses the table lives, so that a recomputation finds it. rows: for each of the K places, the row of each token;
    choices, tokens: the choice and the token of each row.
    """

    slot_of: Tensor
    source: Tensor
    per_expert: int | None
    choice: Choice
    rows: tuple[Lookup, ...]
    choices: Lookup
    tokens: Lookup

    @staticmethod
    def of(slot_of: Tensor, source: Tensor, per_expert: int | None, choice: Choice) -> Rows:
        k, complete = slot_of.shape[1], choice.complete
        rows = tuple(Lookup.of(slot_of[:, place].contiguous(), complete=complete) for place in range(k))
        choices = Lookup.of(source, complete=per_expert is None)
        tokens = choices if k == 1 else Lookup(choices.index.div(k, rounding_mode="floor"), choices.missing)
        return Rows(slot_of, source, per_expert, choice, rows, choices, tokens)


def rows_of(choice: Choice, per_expert: int | None) -> Rows:
    """Lay out what was kept by expert, within an expert by token. per_expert: fixed number of rows, at least the
    largest kept count; None for rows without gaps."""
    num_tokens, k = choice.experts.shape
    num_experts = choice.routed.numel()
    flat = torch.where(choice.kept, choice.experts, num_experts).reshape(-1)  # token-major: s * K + j
    by_expert = torch.sort(flat, stable=True)
    total = int(choice.kept_counts.sum()) if num_tokens else 0
    source, experts = by_expert.indices[:total], by_expert.values[:total]
    slot_of = torch.full((num_tokens * k,), -1, dtype=torch.int64, device=flat.device)
    if per_expert is None:
        slot_of[source] = torch.arange(total, device=flat.device)
        return Rows.of(slot_of.view(num_tokens, k), source, None, choice)
    starts = choice.kept_counts.cumsum(0) - choice.kept_counts
    slots = experts * per_expert + torch.arange(total, device=flat.device) - starts[experts]
    slot_of[source] = slots
    padded = torch.full((num_experts * per_expert,), -1, dtype=torch.int64, device=flat.device)
    padded[slots] = source
    return Rows.of(slot_of.view(num_tokens, k), padded, per_expert, choice)


class _Scatter(Function):
    """x [S, M] -> rows [N, M]."""

    @staticmethod
    def forward(ctx: Any, x_SM: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return rows.tokens.take(x_SM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor, None]:
        first, *others = ctx.rows.rows
        total: Tensor = first.take(grad_NM)
        for other in others:
            total += other.take(grad_NM)
        return total, None


class _Combine(Function):
    """rows [N, M], weights [S, K] -> [S, M]: the weighted sum of each token's rows, added up in at least fp32."""

    @staticmethod
    def forward(ctx: Any, rows_NM: Tensor, weights_SK: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(rows_NM, weights_SK)
        total = None
        for place, lookup in enumerate(rows.rows):
            part = lookup.take(rows_NM).to(weights_SK.dtype)
            part *= weights_SK[:, place : place + 1]
            total = part if total is None else total.add_(part)
        assert total is not None
        return total.to(rows_NM.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SM: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_NM, weights_SK = ctx.saved_tensors
        rows: Rows = ctx.rows
        grad_rows = rows.tokens.take(grad_SM).to(weights_SK.dtype)
        of_row = _products(rows_NM, grad_rows)
        columns = [lookup.take(of_row) for lookup in rows.rows]
        grad_rows *= rows.choices.take(weights_SK.reshape(-1, 1))
        return grad_rows.to(rows_NM.dtype), torch.cat(columns, 1), None


def _products(a_NM: Tensor, b_NM: Tensor) -> Tensor:
    """[N, 1] inner products of rows, in the type of b; in parts, so that what is between stays in the cache."""
    if a_NM.is_cuda:
        return (a_NM * b_NM).sum(1, keepdim=True)
    out = b_NM.new_empty(len(a_NM), 1)
    for start in range(0, len(a_NM), _CACHED_ROWS):
        part = slice(start, start + _CACHED_ROWS)
        torch.sum(a_NM[part] * b_NM[part], 1, keepdim=True, out=out[part])
    return out


class _Reorder(Function):
    """rows[order]; order is a permutation and `inverse` undoes it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None


def scatter(x_SM: Tensor, rows: Rows) -> Tensor:
    """[S, M] -> [N, M]: every kept choice's row is its token, empty rows are zero."""
    out: Tensor = _Scatter.apply(x_SM, rows)
    return out


def combine(rows_NM: Tensor, weights_SK: Tensor, rows: Rows) -> Tensor:
    """[N, M], [S, K] -> [S, M]: a token without a kept choice gets exactly zero."""
    out: Tensor = _Combine.apply(rows_NM, weights_SK, rows)
    return out


def reorder(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """[n, M] in another order, differentiable."""
    out: Tensor = _Reorder.apply(rows, order, inverse)
    return out


def by_expert(counts: Tensor) -> tuple[Tensor, Tensor]:
    """counts: [ranks, experts], rows that came from each rank for each expert of this one, rank by rank.

    Returns (order, inverse) [n] i64: rows[order] are expert by expert, within one by rank.
    """
    ranks, experts = counts.shape
    labels = torch.arange(experts, device=counts.device).repeat(ranks)
    order = torch.sort(labels.repeat_interleave(counts.reshape(-1)), stable=True).indices
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return order, inverse
