"""All-to-all in two steps: between the ranks of a node, then between nodes.

N nodes of G ranks each, rank (n, g) in order. What (n, g) has for (n', g') goes to (n, g') first, and from there to
(n', g'), together with what the other ranks of node n have for it. A rank sends G - 1 + N - 1 messages instead of
N G - 1, which pays where they are small, and (G - 1)/G + (N - 1)/N of its rows instead of (N G - 1)/(N G): about twice
the bytes. What arrives is the same, bit for bit.
(Rajbhandari et al. 2022, arXiv:2201.05596, section 5.3, "hierarchical all-to-all".)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trilithon.contracts import Collectives, ReduceOp, Tag

Table = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class RowCounts:
    """How many rows are where, when parts are not equal.

    have: [N][G], rows here for each rank. passing: [G][N], after the first step, by the rank of this node that they
    come from and the node they go to. arrive: [N][G], by the rank they come from.
    """

    have: Table
    passing: Table
    arrive: Table


class TwoLevel:
    """inner: the ranks of this node, G of them; outer: those with this rank's place in each of the N nodes."""

    def __init__(self, inner: Collectives, outer: Collectives) -> None:
        self._inner, self._outer = inner, outer

    @property
    def world_size(self) -> int:
        return self._inner.world_size * self._outer.world_size

    def count(self, counts: Tensor, tag: Tag) -> tuple[Tensor, RowCounts]:
        """counts: [N G, c] i64, rows for each rank in c kinds -> (those from each rank, all numbers of the exchange).

        Collective over both groups, as all methods are.
        """
        nodes, ranks, kinds = self._outer.world_size, self._inner.world_size, counts.shape[1]
        there = counts.view(nodes, ranks, kinds).transpose(0, 1).contiguous()
        passing = torch.empty_like(there)
        self._inner.all_to_all(passing, there, _step(tag, "inside")).wait()
        onward = passing.transpose(0, 1).contiguous()
        incoming = torch.empty_like(onward)
        self._outer.all_to_all(incoming, onward, _step(tag, "between")).wait()
        have, middle, arrive = (
            table.sum(2).tolist() for table in (counts.view(nodes, ranks, kinds), passing, incoming)
        )
        return incoming.view(nodes * ranks, kinds), RowCounts(have, middle, arrive)

    def there(self, rows: Tensor, counts: RowCounts | None, tag: Tag) -> Tensor:
        """[n, M] in order of the rank they go to -> [m, M] in order of the rank they come from. counts: None: equal."""
        nodes, ranks = self._outer.world_size, self._inner.world_size
        inside, between = _step(tag, "inside"), _step(tag, "between")
        if counts is None:
            rows = _moved(_swapped(rows, None, nodes, ranks), self._inner, None, None, inside)
            return _moved(_swapped(rows, None, ranks, nodes), self._outer, None, None, between)
        rows = _swapped(rows, counts.have, nodes, ranks)
        rows = _moved(rows, self._inner, _column_sums(counts.have), _row_sums(counts.passing), inside)
        rows = _swapped(rows, counts.passing, ranks, nodes)
        return _moved(rows, self._outer, _column_sums(counts.passing), _row_sums(counts.arrive), between)

    def back(self, rows: Tensor, counts: RowCounts | None, tag: Tag) -> Tensor:
        """The inverse of `there`: rows in order of the rank they came from return to it."""
        if counts is None:
            return self.there(rows, None, tag)
        nodes, ranks = self._outer.world_size, self._inner.world_size
        inside, between = _step(tag, "inside"), _step(tag, "between")
        rows = _moved(rows, self._outer, _row_sums(counts.arrive), _column_sums(counts.passing), between)
        rows = _swapped(rows, _transposed(counts.passing), nodes, ranks)
        rows = _moved(rows, self._inner, _row_sums(counts.passing), _column_sums(counts.have), inside)
        return _swapped(rows, _transposed(counts.have), ranks, nodes)

    def largest(self, value: Tensor, tag: Tag) -> None:
        """In place: the maximum over all ranks."""
        self._inner.all_reduce(value, _step(tag, "inside"), ReduceOp.MAX).wait()
        self._outer.all_reduce(value, _step(tag, "between"), ReduceOp.MAX).wait()


def _step(tag: Tag, which: str) -> Tag:
    return Tag(f"{tag.module}, {which}", tag.parameters)


def _swapped(rows: Tensor, table: Table | None, first: int, second: int) -> Tensor:
    """Blocks of rows in order (i, j) become blocks in order (j, i). table: [first][second] rows; None: all equal."""
    if table is None:
        return rows.view(first, second, -1).transpose(0, 1).reshape(rows.shape)
    blocks = rows.split([size for row in table for size in row])
    return torch.cat([blocks[i * second + j] for j in range(second) for i in range(first)])


def _moved(rows: Tensor, group: Collectives, send: list[int] | None, receive: list[int] | None, tag: Tag) -> Tensor:
    width, rows = rows.shape[-1], rows.contiguous()
    if send is None or receive is None:
        out = torch.empty_like(rows)
        group.all_to_all(out, rows, tag).wait()
        return out
    out = rows.new_empty(sum(receive), width)
    numels = {"send": [n * width for n in send], "receive": [n * width for n in receive]}
    group.all_to_all(out, rows, tag, **numels).wait()
    return out


def _row_sums(table: Table) -> list[int]:
    return [sum(row) for row in table]


def _column_sums(table: Table) -> list[int]:
    return [sum(column) for column in zip(*table)]


def _transposed(table: Table) -> Table:
    return list(zip(*table))
