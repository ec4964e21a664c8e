"""Which parameters take part in an update, and how many each has made.

A parameter that got no gradient on any rank is left as it is, weights and moments, as torch.optim leaves a parameter
whose `grad` is None; its bias correction later counts its own updates only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from trilithon.contracts import Slice


class Participation:
    """Counts updates by parameter. `updates`: of a parameter that never sat out."""

    def __init__(self) -> None:
        self.updates = 0
        self._missed: dict[str, int] = {}

    def begin(self, slices: Sequence[Slice]) -> None:
        """One more update; the idle parameters of these slices sit it out."""
        self.updates += 1
        for name in slices[0].idle if slices else ():
            self._missed[name] = self._missed.get(name, 0) + 1

    @property
    def anyone_missed(self) -> bool:
        """Some parameter has made fewer updates than others."""
        return bool(self._missed)

    def of(self, name: str) -> int:
        return self.updates - self._missed.get(name, 0)

    def runs(self, slice_: Slice) -> Iterator[tuple[int, int, int]]:
        """(start, stop, updates): the ranges of the slice that move now, joined where they are at the same count."""
        if not self._missed:
            yield 0, slice_.master.numel(), self.updates
            return
        start, count = 0, -1  # of the open run; -1: none is open
        for shard in slice_.shards:
            now = -1 if shard.name in slice_.idle else self.of(shard.name)
            if now != count:
                if count >= 0:
                    yield start, shard.offset, count
                start, count = shard.offset, now
        if count >= 0:
            yield start, slice_.master.numel(), count

    def copy(self) -> Participation:
        """The counts as they are now."""
        other = Participation()
        other.load(self.updates, self._missed)
        return other

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "missed": dict(self._missed)}

    def load(self, updates: int, missed: Mapping[str, int]) -> None:
        self.updates, self._missed = updates, dict(missed)


def paired_runs(
    slice_: Slice, first: Participation, second: Participation, out: Collection[str] = ()
) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, first count, second count) of the ranges that move: not idle, not in `out`."""
    if not first.anyone_missed and not second.anyone_missed and not out:
        yield 0, slice_.master.numel(), first.updates, second.updates
        return
    for shard in slice_.shards:
        if shard.name not in slice_.idle and shard.name not in out:
            yield shard.offset, shard.offset + shard.numel, first.of(shard.name), second.of(shard.name)


def cut(slice_: Slice, state: Mapping[str, Tensor], start: int, stop: int) -> tuple[Slice, dict[str, Tensor]]:
    """The range [start, stop) of a slice and of its state, as views. A master that rests in the state comes along."""
    master = state.get("master", slice_.master)
    if start == 0 and stop == master.numel():
        return slice_ if master is slice_.master else replace(slice_, master=master), dict(state)
    low = None if slice_.low is None else slice_.low[start:stop]
    part = replace(slice_, master=master[start:stop], grad=slice_.grad[start:stop], low=low, shards=[])
    return part, {name: value[start:stop] for name, value in state.items()}
