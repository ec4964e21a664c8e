"""Where master values rest: beside the low-precision ones, or in a store together with the moments.

Resident masters are one tensor per unit. In a store they are kept slice by slice, none longer than a sub-group,
so that construction, update and checkpoint need one sub-group in memory at a time. With a ratio below 1 some sub-groups
stay near. (Rajbhandari et al. 2021, arXiv:2104.07857, section 5.2.2; Ren et al. 2021, arXiv:2101.06840, section 3.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trilithon.contracts import StateStore
from trilithon.kernels.chunks import CHUNK_NUMEL
from trilithon.tiers import settle
from trilithon.zero.layout import ALIGNMENT, FlatLayout, round_up
from trilithon.zero.unit import Unit

_LEAST_TILES = 64  # a partial offload is split to within this fraction of what the rank holds


@dataclass(eq=False, slots=True)
class Placement:
    """State off the device. sub_group_numel: longest slice; ratio: share of the elements that goes into `store`.

    near: the keys of the slices that stay; filled as units are cut, and read by whoever routes keys.
    """

    store: StateStore
    sub_group_numel: int
    ratio: float = 1.0
    near: set[str] = field(default_factory=set)
    apart: bool = False  # masters are never the parameters themselves, so that they may move while a forward reads
    fallible: bool = False  # requests may fail on one rank alone, so that ranks have to agree on it


@dataclass(frozen=True, slots=True)
class Span:
    """One slice to be: [start, stop) of the flat buffer, of one parameter group."""

    key: str
    group: int
    start: int
    stop: int


def spans(unit_name: str, layout: FlatLayout, own: tuple[int, int], longest: int | None) -> list[Span]:
    """What a rank that owns `own` updates, one span per parameter group, or several of at most `longest` elements.

    Cuts fall on the starts of parameters or whole chunks into them, where kernels that add up norms begin anew, so that
    sums do not depend on them (unless `longest` is shorter than a chunk).
    """
    found = []
    for group, start, stop in layout.group_ranges(*own):
        if not any(True for _ in layout.pieces(start, stop)):
            continue
        key = f"{unit_name}/{group}"
        if longest is None or stop - start <= longest:
            found.append(Span(key, group, start, stop))
            continue
        bounds = list(_bounds(layout, start, stop, round_up(longest, ALIGNMENT)))
        cuts = [(low, high) for low, high in bounds if any(True for _ in layout.pieces(low, high))]
        found += [Span(f"{key}/{index}", group, low, high) for index, (low, high) in enumerate(cuts)]
    return found


def _bounds(layout: FlatLayout, start: int, stop: int, longest: int) -> Iterator[tuple[int, int]]:
    at = start
    while at < stop:
        end = min(at + longest, stop)
        if end < stop:
            inside = next((f for f in layout.fields if f.start < end < f.stop), None)
            if inside is not None:
                first = max(inside.start, start)
                snapped = first + (end - first) // CHUNK_NUMEL * CHUNK_NUMEL
                end = snapped if snapped > at else end
        yield at, end
        at = end


class Masters:
    """The master values of all units of this rank. own_numel: elements that this rank updates, about."""

    def __init__(self, placement: Placement | None, own_numel: int) -> None:
        self.placement = placement
        self._values: dict[str, Tensor] = {}  # of slices that stay near
        self._spans: dict[int, list[Span]] = {}  # by index of the unit
        self._seen = self._far = 0
        self._longest: int | None = None
        if placement is not None:
            self._longest = placement.sub_group_numel
            if 0.0 < placement.ratio < 1.0:
                self._longest = min(self._longest, round_up(max(own_numel // _LEAST_TILES, 1), ALIGNMENT))

    # ---------------------------------------------------------------------------------------------- construction
    def adopt(self, unit: Unit, values: Tensor) -> None:
        """Give the unit its initial values, [padded] in the master type, and put the masters where they rest."""
        own = self._spans[unit.index] = spans(unit.name, unit.layout, unit.own, self._longest) if unit.trainable else []
        unit.adopt(values, keep_master=self.placement is None)
        if self.placement is None:
            return
        for span in own:
            mine = values[span.start : span.stop]
            self._seen += mine.numel()
            if self._far + mine.numel() <= self.placement.ratio * self._seen:
                self._far += mine.numel()
                self._send_off(span.key, mine)
            else:
                self.placement.near.add(span.key)
                same = unit.dtype == unit.master_dtype and not self.placement.apart and unit.rest is None
                self._values[span.key] = self._shard(unit, span) if same else settle(mine)

    def _send_off(self, key: str, values: Tensor) -> None:
        assert self.placement is not None
        with self.placement.store.borrow(key, lambda: {"master": settle(values.cpu())}):
            pass

    @staticmethod
    def _shard(unit: Unit, span: Span) -> Tensor:
        return unit.shard[span.start - unit.own[0] : span.stop - unit.own[0]]

    # ------------------------------------------------------------------------------------------------- read, write
    def spans(self, unit: Unit) -> list[Span]:
        return self._spans[unit.index]

    def value(self, unit: Unit, span: Span) -> Tensor:
        """[n]: the values while they are resident, else a tensor without values ("meta") of their shape and type."""
        if self.placement is None:
            return unit.master[span.start - unit.own[0] : span.stop - unit.own[0]]
        if span.key in self._values:
            return self._values[span.key]
        return torch.empty(span.stop - span.start, dtype=unit.master_dtype, device="meta")

    def of(self, unit: Unit) -> Tensor:
        """[own], gaps zero: the values themselves when they are resident, else a copy. Raises TierError."""
        if self.placement is None:
            return unit.master
        whole = torch.zeros(unit.own[1] - unit.own[0], dtype=unit.master_dtype, device=unit.flat.device)
        for span in self.spans(unit):
            here = whole[span.start - unit.own[0] : span.stop - unit.own[0]]
            if span.key in self._values:
                here.copy_(self._values[span.key])
            else:
                with self.placement.store.borrow(span.key, write=False) as state:
                    here.copy_(state["master"])
        return whole

    def take_over(self, unit: Unit, field_index: int) -> None:
        """The whole values of one parameter were rewritten: refresh this rank's shard and masters. Raises TierError.

        A master that still rounds to the value beside it was not written, and keeps its digits.
        """
        unit.take_over(field_index)
        if self.placement is None or not unit.trainable:
            return
        parameter = unit.layout.fields[field_index]
        for span in self.spans(unit):
            low, high = max(span.start, parameter.start), min(span.stop, parameter.stop)
            if low >= high:
                continue
            here, values = slice(low - span.start, high - span.start), unit.flat[low:high]
            if span.key in self._values:
                unit.rewrite(self._values[span.key][here], values)
            else:
                with self.placement.store.borrow(span.key) as state:
                    unit.rewrite(state["master"][here], values)

    def bytes(self, unit: Unit) -> int:
        """Of masters that are resident on the device and not the low-precision values themselves."""
        found = [unit.master, *(self._values[s.key] for s in self.spans(unit) if s.key in self._values)]
        shared = None if unit.rest is not None else unit.shard.untyped_storage().data_ptr()
        apart = [values for values in found if values.untyped_storage().data_ptr() != shared]
        return sum(values.numel() * values.element_size() for values in apart)
