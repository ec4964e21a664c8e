"""Which part of each unit this rank updates: slices of one unit and parameter group, with the shards inside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trilithon.contracts import Shard, Slice
from trilithon.zero.gradients import UnitGradients
from trilithon.zero.layout import Piece
from trilithon.zero.masters import Masters, Span
from trilithon.zero.resting import Opened, RestingSlice
from trilithon.zero.unit import Unit


@dataclass(eq=False, slots=True)
class Cut:
    """The slices of this rank, in the order of units, and where each lies in its unit's owned range."""

    slices: list[Slice] = field(default_factory=list)
    ranges: dict[str, tuple[UnitGradients, int, int]] = field(default_factory=dict)  # by key: start, stop in `unit.own`
    keys_of: dict[int, set[str]] = field(default_factory=dict)  # by index of the unit

    @staticmethod
    def of(gradients: Sequence[UnitGradients], masters: Masters, opened: Opened | None = None) -> Cut:
        """Cuts what this rank owns of every trainable unit. opened: for what rests off the device."""
        cut = Cut()
        for one in gradients:
            cut.keys_of[one.unit.index] = set()
            for span in masters.spans(one.unit):
                cut._add(one, span, masters.value(one.unit, span), opened)
        return cut

    def _add(self, gradients: UnitGradients, span: Span, master: Tensor, opened: Opened | None) -> None:
        unit = gradients.unit
        here = slice(span.start - unit.own[0], span.stop - unit.own[0])
        low, pieces = unit.shard[here], unit.layout.pieces(span.start, span.stop)
        part = (Slice if opened is None else RestingSlice)(
            key=span.key,
            group=span.group,
            master=master,
            grad=torch.empty(0, dtype=master.dtype),
            low=None if master.device.type != "meta" and master.data_ptr() == low.data_ptr() else low,
            shards=[shard for piece in pieces for shard in shards_of(piece)],
        )
        if opened is not None and isinstance(part, RestingSlice):
            opened.attach(part, gradients, here.start, here.stop)
        self.slices.append(part)
        self.ranges[part.key] = (gradients, here.start, here.stop)
        self.keys_of[unit.index].add(part.key)

    def hand_out_gradients(self) -> None:
        """Each slice's `grad` becomes its part of what has been reduced."""
        for part in self.slices:
            gradients, start, stop = self.ranges[part.key]
            if not gradients.at_rest:
                assert gradients.result is not None
                part.grad = gradients.result[start:stop]

    def of_unit(self, unit: Unit) -> list[tuple[Slice, int, int]]:
        """(slice, start, stop) in the unit's owned range."""
        return [(p, a, b) for p in self.slices for g, a, b in [self.ranges[p.key]] if g.unit is unit]


def shards_of(piece: Piece) -> Iterator[Shard]:
    """A piece under the name it has in the plain model: a tile's are ranges of the weight that it is cut from."""
    region = piece.field.region
    if region is None:
        yield Shard(piece.field.name, piece.start, piece.numel, piece.offset, torch.Size(piece.field.shape))
        return
    for here, there, numel in region.runs(piece.start, piece.numel):
        yield Shard(region.name, there, numel, piece.offset + here - piece.start, torch.Size(region.shape))
