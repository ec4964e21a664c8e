"""Whole tensors of a cut model, one at a time, on every rank: parameters, masters, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from trilithon.contracts import Tag
from trilithon.zero.composite import Places
from trilithon.zero.grouping import Entry
from trilithon.zero.joining import Joining
from trilithon.zero.unit import Unit

OwnOf = Callable[[Unit], Tensor | None]
Together = Callable[[Callable[[], Tensor | None], str], Tensor | None]


class WholeTensors:
    """units, outside: where the parameters are, `outside` those that are whole and in no unit. together: does what may
    fail on one rank alone, and then fails on all."""

    def __init__(
        self, units: Sequence[Unit], outside: Sequence[Entry], joining: Joining, places: Places, together: Together
    ) -> None:
        self._units, self._outside, self._joining = units, outside, joining
        self._places, self._together = places, together

    def of(self, own_of: OwnOf, names: Sequence[str], step: int) -> Iterator[tuple[str, Tensor]]:
        """Collective. (name, tensor) under the plain model's names; see `ZeroSharding.full_of`."""
        yield from self._joining.join(self._pieces(own_of, self._joining.parts(names), step))

    def outside(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """What is in no unit."""
        wanted = self._joining.parts(names)
        found = [entry for entry in self._outside if entry.name in wanted]
        yield from self._joining.join((e.name, self._places.join(e.param, e.name, e.param.detach(), -1)) for e in found)

    def _pieces(self, own_of: OwnOf, wanted: set[str], step: int) -> Iterator[tuple[str, Tensor]]:
        for unit in self._units:
            fields = [field for field in unit.layout.fields if field.name in wanted]
            own = self._together(lambda unit=unit: own_of(unit), "reading state") if fields else None  # type: ignore[misc]
            if own is None:
                continue
            whole = own
            if own.numel() != unit.layout.padded or (unit.comm.world_size > 1 and unit.own != (0, unit.layout.padded)):
                whole = own.new_empty(unit.layout.padded)
                unit.comm.all_gather(whole, own, Tag(unit.name, tuple(f.name for f in fields), step)).wait()
            params = dict(zip((field.name for field in unit.layout.fields), unit.params, strict=True))
            for field in fields:
                here = whole[field.start : field.stop].view(field.shape)
                yield field.name, self._places.join(params[field.name], field.name, here, step)
