"""Which tensors a rule with one norm per tensor sees: every parameter, and of a stacked one every member by itself.

The experts of a layer are stacked into one parameter for the sake of speed. To LAMB each of them is a weight of its
own, as it is where they are modules of a list (You et al. 2020, arXiv:1904.00962, algorithm 2: one ratio per layer).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trilithon.contracts import Shard


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter [members, ...], `numel` elements each. Shards count in the whole of it, whatever a rank holds."""

    members: int
    numel: int


class NormTable:
    """The rows of a table with one entry per tensor, in an order that all ranks share.

    names: of the parameters; stacks: by name, those that are stacks. labels: of the rows; parameters: of each row.
    """

    def __init__(self, names: Sequence[str], stacks: Mapping[str, Stack] | None = None) -> None:
        self._stacks = {name: stack for name, stack in (stacks or {}).items() if stack.numel > 0}
        self._row: dict[str, int] = {}
        self.labels: list[str] = []
        self.parameters: list[str] = []
        for name in names:
            stack = self._stacks.get(name)
            self._row[name] = len(self.labels)
            self.labels += [name] if stack is None else [f"{name}[{index}]" for index in range(stack.members)]
            self.parameters += [name] * (1 if stack is None else stack.members)

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, name: str) -> range:
        """The rows of one parameter."""
        stack, row = self._stacks.get(name), self._row[name]
        return range(row, row + (1 if stack is None else stack.members))

    def parts(self, shard: Shard) -> Iterator[tuple[int, int, int]]:
        """(row, start, stop): the shard, cut where another tensor begins; in elements of the slice."""
        stack, at, row = self._stacks.get(shard.name), shard.start, self._row[shard.name]
        if stack is None:
            yield row, shard.offset, shard.offset + shard.numel
            return
        shift, end = shard.offset - shard.start, shard.start + shard.numel
        while at < end:
            member = at // stack.numel
            stop = min(end, (member + 1) * stack.numel)
            yield row + member, at + shift, stop + shift
            at = stop
