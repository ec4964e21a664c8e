"""After an update: values that are whole between uses are gathered again, unit by unit.

Gathers are launched in the order of units on every rank, each as soon as all slices of the units before it are updated,
so that they run while later slices are still being updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trilithon.contracts import Handle, Slice
from trilithon.zero.unit import Unit


class Publishing:
    """units: the trainable ones, in order; keys_of: the slices of each, by the unit's index."""

    def __init__(self, units: Sequence[Unit], keys_of: Mapping[int, set[str]]) -> None:
        self._units, self._keys_of = list(units), keys_of
        self._next = 0  # of the units, not yet launched
        self._updated: set[str] = set()
        self._flying: list[Handle] = []

    def updated(self, slice_: Slice, step: int) -> None:
        """One slice has its new values."""
        self._updated.add(slice_.key)
        while self._next < len(self._units):
            unit = self._units[self._next]
            if not self._keys_of[unit.index] <= self._updated:
                return
            self._launch(unit, step)

    def finish(self, step: int) -> None:
        """All slices have theirs: launch the rest, and wait for everything."""
        while self._next < len(self._units):
            self._launch(self._units[self._next], step)
        for handle in self._flying:
            handle.wait()
        self._flying.clear()
        self._updated.clear()
        self._next = 0

    def _launch(self, unit: Unit, step: int) -> None:
        self._next += 1
        handle = unit.launch_publish(unit.tag(step))
        if handle is not None:
            self._flying.append(handle)
