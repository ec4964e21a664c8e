"""How rows of tokens get to the ranks that hold their experts, and back, so that autograd can follow.

`ExpertRanks` are the ranks around one layer. `group` share out its experts; rows go there in one all-to-all, or in two
with `levels`. Ranks of `tensor` have the same tokens, since they hold slices of the same dense matrices: each sends
every T-th row only, computes on these, and gathers the results of the others. So no row is sent or computed twice, and
a rank finds 1/T of its experts' gradient. (Rajbhandari et al. 2022, arXiv:2201.05596, section 5.3, "parallelism
coordinated communication"; Singh et al. 2023, arXiv:2303.06318, section 4.1.)
"""

# E experts, M width, N rows, T tensor ranks

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trilithon.comm.hierarchical import RowCounts, TwoLevel
from trilithon.contracts import Collectives, ReduceOp, Tag


class Trip(Protocol):
    """One way there and back for rows in order of ranks."""

    def there(self, rows: Tensor, tag: Tag) -> Tensor:
        """[n, M] in order of the rank they go to -> [m, M] in order of the rank they come from."""
        ...

    def back(self, rows: Tensor, tag: Tag) -> Tensor:
        """The inverse: [m, M] -> [n, M]."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Flat:
    """One all-to-all. send, receive: rows for and from each rank; None for equal parts."""

    group: Collectives
    send: list[int] | None = None
    receive: list[int] | None = None

    def there(self, rows: Tensor, tag: Tag) -> Tensor:
        return _all_to_all(rows, self.group, self.send, self.receive, tag)

    def back(self, rows: Tensor, tag: Tag) -> Tensor:
        return _all_to_all(rows, self.group, self.receive, self.send, tag)


@dataclass(frozen=True, eq=False, slots=True)
class InTwoSteps:
    """Inside nodes and between them. counts: None for equal parts."""

    levels: TwoLevel
    counts: RowCounts | None = None

    def there(self, rows: Tensor, tag: Tag) -> Tensor:
        return self.levels.there(rows.contiguous(), self.counts, tag)

    def back(self, rows: Tensor, tag: Tag) -> Tensor:
        return self.levels.back(rows.contiguous(), self.counts, tag)


@dataclass(frozen=True, eq=False, slots=True)
class ExpertRanks:
    """The ranks around one layer; see above. group: in order of the experts that they hold."""

    group: Collectives
    levels: TwoLevel | None = None
    tensor: Collectives | None = None

    @property
    def spread(self) -> bool:
        """The experts are on several ranks."""
        return self.group.world_size > 1

    @property
    def share(self) -> tuple[int, int]:
        """(which, of how many): the part of the rows that this rank sends."""
        return (self.tensor.rank, self.tensor.world_size) if self.tensor is not None else (0, 1)

    def equal(self) -> Trip:
        """For equal numbers of rows for each rank."""
        return InTwoSteps(self.levels) if self.levels is not None else Flat(self.group)

    def counted(self, counts: Tensor, tag: Tag) -> tuple[Trip, Tensor]:
        """counts: [ranks, experts] i64, rows for each rank by its experts -> (the way, rows from each). Collective."""
        if self.levels is not None:
            incoming, numbers = self.levels.count(counts.contiguous(), tag)
            return InTwoSteps(self.levels, numbers), incoming
        incoming = torch.empty_like(counts, memory_format=torch.contiguous_format)
        self.group.all_to_all(incoming, counts.contiguous(), tag).wait()
        return Flat(self.group, counts.sum(1).tolist(), incoming.sum(1).tolist()), incoming

    def largest(self, value: int, device: torch.device, tag: Tag) -> int:
        """The maximum over the group. Collective."""
        most = torch.tensor([value], device=device)
        if self.levels is not None:
            self.levels.largest(most, tag)
        else:
            self.group.all_reduce(most, tag, ReduceOp.MAX).wait()
        return int(most)


def exchange(rows: Tensor, trip: Trip, tag: Tag, *, home: bool = False) -> Tensor:
    """[n, M] -> [m, M], differentiable; home: the way back. Every rank of the group calls it, also with no row."""
    out: Tensor = _Exchange.apply(rows, trip, tag, home)
    return out


def own_rows(rows: Tensor, tensor: Collectives, tag: Tag) -> Tensor:
    """[N, M], equal on all T ranks -> every T-th row, beginning with the one at this rank's number."""
    out: Tensor = _OwnRows.apply(rows, tensor, tag)
    return out


def all_rows(rows: Tensor, number: int, tensor: Collectives, tag: Tag) -> Tensor:
    """The inverse of `own_rows`: -> [number, M] on all ranks, which compute the same from it."""
    out: Tensor = _AllRows.apply(rows, number, tensor, tag)
    return out


def counts_of_share(counts: Tensor, share: tuple[int, int]) -> Tensor:
    """counts: [E] rows of each expert, in order -> [E] how many of them are in this rank's share."""
    which, parts = share
    if parts == 1:
        return counts
    ends = counts.cumsum(0)
    before = (ends + (parts - 1 - which)).div(parts, rounding_mode="floor")  # rows below each end that are ours
    return torch.diff(before, prepend=before.new_zeros(1))


class _Exchange(Function):
    """Backward takes the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip, tag: Tag, home: bool) -> Tensor:
        ctx.trip, ctx.tag, ctx.home = trip, tag, home
        return trip.back(rows, tag) if home else trip.there(rows, tag)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        tag = Tag(f"{ctx.tag.module}, backward", ctx.tag.parameters)
        return ctx.trip.there(grad, tag) if ctx.home else ctx.trip.back(grad, tag), None, None, None


class _OwnRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, tensor: Collectives, tag: Tag) -> Tensor:
        ctx.number, ctx.tensor, ctx.tag = len(rows), tensor, tag
        return rows[tensor.rank :: tensor.world_size].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        tag = Tag(f"{ctx.tag.module}, backward", ctx.tag.parameters)
        return _interleaved(grad, ctx.number, ctx.tensor, tag), None, None


class _AllRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, number: int, tensor: Collectives, tag: Tag) -> Tensor:
        ctx.tensor = tensor
        return _interleaved(rows, number, tensor, tag)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.tensor.rank :: ctx.tensor.world_size].contiguous(), None, None, None


def _interleaved(rows: Tensor, number: int, tensor: Collectives, tag: Tag) -> Tensor:
    """All-gather of every T-th row, in order. number: of all rows, the same on all ranks."""
    width, ranks = rows.shape[-1], tensor.world_size
    longest = -(-number // ranks)
    if longest == 0:
        return rows.new_empty(0, width)
    mine = rows.contiguous()
    if len(mine) < longest:
        mine = torch.cat((mine, mine.new_zeros(longest - len(mine), width)))
    full = mine.new_empty(ranks, longest, width)
    tensor.all_gather(full.view(-1), mine.view(-1), tag).wait()
    return full.transpose(0, 1).reshape(-1, width)[:number]


def _all_to_all(
    rows: Tensor, group: Collectives, send: list[int] | None, receive: list[int] | None, tag: Tag
) -> Tensor:
    width = rows.shape[-1]
    rows = rows.contiguous()
    if send is None or receive is None:
        out = torch.empty_like(rows)
        group.all_to_all(out, rows, tag).wait()
        return out
    out = rows.new_empty(sum(receive), width)
    group.all_to_all(out, rows, tag, receive=[n * width for n in receive], send=[n * width for n in send]).wait()
    return out
