"""The inside of `gathered` for the parameters of one engine: whole values, watched or written back.

At stage 3 the units of the parameters are held whole as long as the context is open; at the others they are whole
anyway, and the context only watches for writes and makes them equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from trilithon.contracts import Collectives, Tag
from trilithon.errors import ProtocolError
from trilithon.zero.gather import changed_since, fingerprints, require_rank, restored_on_error
from trilithon.zero.grouping import Entry
from trilithon.zero.residency import GatherOnUse
from trilithon.zero.unit import Unit


class Holding:
    """Opens contexts over the parameters of `units` and over `outside`, parameters that are whole and in no unit.

    any_rank: agrees on flags over all ranks. take_over: of rewritten parameters, as (unit, index).
    residency: None where everything is whole. writer_of: for a parameter and the rank that writes, the group in which
    its values are spread and their source there; None: `control` and the rank.
    """

    def __init__(  # noqa: PLR0917 (made once, by the sharding)
        self, units: Sequence[Unit], outside: Sequence[Entry], control: Collectives, residency: GatherOnUse | None,
        any_rank: Callable[[Sequence[bool], str], list[bool]],
        take_over: Callable[[Sequence[tuple[Unit, int]]], None],
        writer_of: Callable[[Tensor, int], tuple[Collectives, int]] | None = None,
    ) -> None:  # fmt: skip
        self._keep = take_over
        self._writer_of = writer_of or (lambda _, rank: (control, rank))
        self._units, self._outside, self._control, self._any_rank = units, outside, control, any_rank
        self._residency = residency
        self._reading: list[dict[str, tuple[int, int]]] = []  # fingerprints of the open contexts

    @contextmanager
    def hold(self, params: Sequence[nn.Parameter], modify: int | None, step: int) -> Iterator[Mapping[str, Tensor]]:
        """Collective at both ends. Raises ProtocolError on all ranks if values changed without `modify`."""
        require_rank(modify, self._control.world_size)
        if self._residency is not None and self._residency.uneven:
            raise ProtocolError("gathered() inside uneven() would wait for ranks that are done: leave uneven() first.")
        wanted = {id(param) for param in params}
        places = [(u, i) for u in self._units for i, param in enumerate(u.params) if id(param) in wanted]
        outside = {entry.name: entry.param for entry in self._outside if id(entry.param) in wanted}
        values = {u.layout.fields[i].name: u.params[i] for u, i in places} | outside
        staying = [u.params[i] for u, i in places if u.whole_values]  # what is freed afterwards needs no copy
        with self._whole(dict.fromkeys(unit for unit, _ in places if not unit.whole_values)):
            before = fingerprints(values) if modify is None else {}
            self._reading.append(before)
            try:
                with restored_on_error([*staying, *outside.values()]):
                    yield values
                    if modify is None:
                        self._refuse_changes(changed_since(before, values), list(values))
                    else:
                        self._take_over(places, values, modify, step)
            finally:
                self._reading = [other for other in self._reading if other is not before]

    @contextmanager
    def _whole(self, units: Mapping[Unit, None]) -> Iterator[None]:
        if self._residency is None:
            yield
            return
        for unit in units:
            self._residency.hold(unit)
        try:
            yield
        finally:
            for unit in units:
                self._residency.let_go(unit)

    def _refuse_changes(self, changed: set[str], names: Sequence[str]) -> None:
        flags = self._any_rank([name in changed for name in names], "gathered() for reading")
        guilty = [name for name, flag in zip(names, flags, strict=True) if flag]
        if guilty:
            raise ProtocolError(
                f"values of {guilty} were changed inside gathered(), which was opened for reading: the change would be "
                "lost. Write `with trilithon.zero.gathered(params, modify=0):` to keep what rank 0 writes."
            )

    def _take_over(
        self, places: Sequence[tuple[Unit, int]], values: Mapping[str, Tensor], source: int, step: int
    ) -> None:
        for name, value in values.items():
            group, index = self._writer_of(value, source)
            group.broadcast(value.data, index, Tag("gathered(modify=)", (name,), step)).wait()
        self._keep(places)
        written = fingerprints(values)
        for outer in self._reading:  # contexts around this one do not take the write for a stray one
            outer.update((name, written[name]) for name in outer.keys() & written.keys())
