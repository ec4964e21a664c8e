"""Several parameters as one flat fp32 vector without gaps: what travels in a single exchange.

Slices, in which update rules keep their state, leave gaps between parameters and may hold only a part of each. The
vector does not: its order (by name) and its length depend on the model alone, so what was lost in compression can be
taken over by a run with other buckets or another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from trilithon.contracts import Collectives, ReduceOp, Shard, Slice, Tag

StateOf = Callable[[Slice], AbstractContextManager[Mapping[str, Tensor]]]


class Fused:
    """flat: [padded] f32, zero behind `numel`; names: in the order of the vector."""

    def __init__(
        self, shapes: Mapping[str, torch.Size], names: Iterable[str], padded: int | None, device: torch.device
    ) -> None:
        self.names = sorted(name for name in names if shapes[name].numel())
        self._spans: dict[str, tuple[int, int]] = {}
        at = 0
        for name in self.names:
            self._spans[name] = (at, at + shapes[name].numel())
            at += shapes[name].numel()
        self.numel = at
        self.flat = torch.zeros(at if padded is None else padded, dtype=torch.float32, device=device)

    def __contains__(self, name: str) -> bool:
        return name in self._spans

    def view(self, name: str, of: Tensor | None = None) -> Tensor:
        """The part of one parameter in this vector, or in another one of the same layout."""
        start, stop = self._spans[name]
        return (self.flat if of is None else of)[start:stop]

    def pieces(self, slice_: Slice, of: Tensor | None = None) -> Iterator[tuple[Shard, Tensor]]:
        """Every shard of the slice that is in the vector, with its part there."""
        for shard in slice_.shards:
            if shard.name in self._spans:
                yield shard, self.view(shard.name, of)[shard.start : shard.start + shard.numel]

    def indices(self, names: Iterable[str]) -> Tensor | None:
        """[k] int64, ascending: where these parameters stand; None for none."""
        spans = sorted(self._spans[name] for name in names if name in self._spans)
        ranges = [torch.arange(start, stop, device=self.flat.device) for start, stop in spans]
        return torch.cat(ranges) if ranges else None

    def layout(self) -> list[tuple[str, int]]:
        """(name, elements) in order, for a checkpoint."""
        return [(name, stop - start) for name, (start, stop) in self._spans.items()]


def whole_vector(
    fused: Fused, slices: Sequence[Slice], state_of: StateOf, field: str, group: Collectives, *, complete: bool
) -> Tensor:
    """[numel] f32 of one field, from this rank's slices of it. Collective unless they are complete."""
    vector = torch.zeros(fused.numel, dtype=torch.float32, device=fused.flat.device)
    for slice_ in slices:
        with state_of(slice_) as state:
            for shard, there in fused.pieces(slice_, vector):
                there.copy_(state[field][shard.offset : shard.offset + shard.numel])
    if not complete:  # every element is on one rank, and zero on the others
        group.all_reduce(vector, Tag(f"whole {field}"), ReduceOp.SUM).wait()
    return vector
