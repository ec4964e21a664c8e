"""One sharding over parameters that live on different ranks.

Dense parameters are on every rank of the data axis. An expert of a mixture is on the few ranks of its expert-data
group, a slice of a tensor-parallel weight on the data group of its tensor rank. What differs between such sets is
written down here, per parameter; units never mix sets, and everything else (the order of reductions, the norm, the
decision to skip, publishing) is one for all of them.

The gradient's divisor is its own number: with the mean taken over D ranks, an expert that tokens of all D ranks reach,
held by D / EP of them, is summed over those and divided by D.
(Expert and data parallelism with ZeRO on both: Kim et al. 2021, arXiv:2109.10465, section 3.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trilithon.contracts import Collectives, Slice, Tag
from trilithon.zero.grouping import Entry
from trilithon.zero.layout import Region
from trilithon.zero.unit import Unit

SlicesOf = Callable[[Unit], Sequence[tuple[Slice, int, int]]]


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """The ranks that hold the same parameters, and how their gradients become the gradient of the mean loss.

    gather, reduce: two groups over those ranks. divisor: what the sum of gradients over `reduce` is divided by.
    counted: by how many ranks of the control group beside this one's replicas each element is held as well (a parameter
    that tensor-parallel ranks replicate), so that norms count it once. index_of: a rank of the control group -> its
    place in its own group of this kind.
    """

    name: str
    gather: Collectives
    reduce: Collectives
    divisor: int
    index_of: Callable[[int], int]
    counted: int = 1

    @property
    def world_size(self) -> int:
        return self.gather.world_size

    @property
    def rank(self) -> int:
        return self.gather.rank


@dataclass(frozen=True, slots=True, eq=False)
class RankPlacement:
    """Where one parameter lives, if it is not like the others.

    replicas: who else holds it; None for the data axis. region, parts: it is a block of a larger parameter, which the
    ranks of `parts` hold in order along the one dimension in which block and whole differ. keep_dtype: it is computed
    in its own type under bf16 and fp16 as well. assemble: makes the whole parameter of a block that is no region.
    """

    replicas: Replicas | None = None
    region: Region | None = None
    parts: Collectives | None = None
    keep_dtype: bool = False
    assemble: Callable[[Tensor], Tensor] | None = None

    def join(self, block: Tensor, tag: Tag) -> Tensor:
        """Collective over `parts`: the whole parameter."""
        if self.assemble is not None:
            return self.assemble(block)
        if self.region is None or self.parts is None or self.parts.world_size == 1:
            return block
        everyone = block.new_empty(self.parts.world_size, *block.shape)
        self.parts.all_gather(everyone, block.contiguous(), tag).wait()
        dim = next((d for d, (w, b) in enumerate(zip(self.region.shape, self.region.block)) if w != b), 0)
        return everyone.flatten(0, 1) if dim == 0 else torch.cat(list(everyone.unbind(0)), dim)


class Places:
    """Who holds what, for one model. placements: by id of the parameters that are not on the data axis like the others.

    control, gather, reduce: the groups of `sharding.Communicators`. several: there is more than one set of ranks.
    """

    def __init__(
        self, control: Collectives, gather: Collectives, reduce: Collectives, placements: Mapping[int, RankPlacement]
    ) -> None:
        self._control, self._placements = control, placements
        self._data = Replicas("", gather, reduce, reduce.world_size, lambda rank: rank)
        self.several = any(placement.replicas is not None for placement in placements.values())
        self.of_unit: dict[Unit, Replicas] = {}

    def put(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries with what their placement says about ranks, type and region."""
        return [self._put(entry) for entry in entries]

    def _put(self, entry: Entry) -> Entry:
        placement = self._placements.get(id(entry.param))
        if placement is None:
            return entry
        dtype = entry.dtype
        if placement.keep_dtype and entry.param.dtype.is_floating_point:
            dtype = torch.promote_types(entry.param.dtype, torch.float32)
        return replace(entry, dtype=dtype, region=placement.region or entry.region, place=placement.replicas)

    def of(self, entry: Entry) -> Replicas:
        """The ranks that hold a parameter."""
        return entry.place if isinstance(entry.place, Replicas) else self._data

    def alone(self, entry: Entry) -> bool:
        """On several ranks, no other one holds this parameter: nothing is left to cut."""
        return entry.place is not None and self.of(entry).world_size == 1

    def copies(self, unit: Unit, *, whole: bool) -> int:
        """Ranks that contribute the same elements to a sum over the control group. whole: each holds all state."""
        replicas = self.of_unit[unit]
        if not self.several:
            return 1
        return replicas.counted * (replicas.world_size if whole else 1)

    def count(self, slices_of: SlicesOf, units: Sequence[Unit], *, whole: bool) -> None:
        """Tell each slice how many ranks hold it."""
        for unit in units:
            for part, _, _ in slices_of(unit):
                part.copies = self.copies(unit, whole=whole)

    def writer_of(self, param: Tensor, rank: int) -> tuple[Collectives, int]:
        """In which group the values that `rank` writes are spread, and its place there."""
        placement = self._placements.get(id(param))
        if placement is None or placement.replicas is None:
            return self._control, rank
        return placement.replicas.gather, placement.replicas.index_of(rank)

    def join(self, param: Tensor, name: str, block: Tensor, step: int) -> Tensor:
        """Collective: the whole of a parameter of which each rank holds a block."""
        placement = self._placements.get(id(param))
        return block if placement is None else placement.join(block, Tag("whole parameter", (name,), step))
