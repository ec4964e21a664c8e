"""Stage 3 with values and gradients off the device: a unit's slices rest in stores between their uses.

    forward, backward   read ahead -> the owned part of the unit's flat buffer -> gathered, used, freed
    a reduction ends    the reduced slice goes to its store; the next one of the same window is added to it
    the update          one unit at a time is open: its gradient is read, its new values are written

The update rule reads `slice.grad` and writes `slice.low` as ever; both are brought when they are asked for.
(Rajbhandari et al. 2021, arXiv:2104.07857, sections 5.1.1 and 6.1.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from trilithon.contracts import Slice, StateStore
from trilithon.errors import TierError
from trilithon.zero.gradients import UnitGradients
from trilithon.zero.unit import Unit


@dataclass(frozen=True, slots=True)
class UnitSize:
    """What one unit will keep off the device on this rank. numel: owned elements."""

    numel: int
    values_itemsize: int
    gradient_itemsize: int  # 0 for frozen parameters


@dataclass(frozen=True, slots=True)
class Resting:
    """The stores of one engine; None: on the device. fallible: requests may fail on one rank alone."""

    values: StateStore | None = None
    gradients: StateStore | None = None
    fallible: bool = False

    def failure(self) -> TierError | None:
        """A request that failed in the background."""
        return next((s.failure for s in (self.values, self.gradients) if s is not None and s.failure is not None), None)

    def bytes(self) -> dict[str, dict[str, int]]:
        """{"disk": {"parameters": ..., "gradients": ...}, "host": {"buffers": ...}}: what rests, by tier."""
        found: dict[str, dict[str, int]] = {}
        for category, store in (("parameters", self.values), ("gradients", self.gradients)):
            sizes = store.bytes() if store is not None else {}
            for tier, size in sizes.items():
                kind = "buffers" if tier == "host" and "disk" in sizes else category
                found.setdefault(tier, {})
                found[tier][kind] = found[tier].get(kind, 0) + size
        return found

    def close(self) -> None:
        for store in (self.values, self.gradients):
            if store is not None:
                store.close()


OpenStores = Callable[[Sequence[UnitSize]], Resting]


class RestingSlice(Slice):
    """A slice whose low-precision values, and maybe gradient, are brought when they are read."""

    brings = True
    _bring_low: Callable[[], Tensor] | None = None
    _bring_grad: Callable[[], Tensor] | None = None

    def attach(self, low: Callable[[], Tensor] | None, grad: Callable[[], Tensor] | None) -> None:
        self._bring_low, self._bring_grad = low, grad

    @property
    def low(self) -> Tensor | None:
        return self._low if self._bring_low is None else self._bring_low()

    @low.setter
    def low(self, value: Tensor | None) -> None:
        self._low = value

    @property
    def grad(self) -> Tensor:
        return self._grad if self._bring_grad is None else self._bring_grad()

    @grad.setter
    def grad(self, value: Tensor) -> None:
        self._grad = value


class Opened:
    """The one unit whose values and gradient are in memory for the update. Opening another closes it.

    order: the units of the slices, in order; the next one is read while this one is used.
    """

    def __init__(self, order: Sequence[UnitGradients]) -> None:
        units = [one.unit for one in order]
        self._next = {unit.index: following for unit, following in zip(units, order[1:], strict=False)}
        self._unit: Unit | None = None
        self._stack = ExitStack()
        self._values: Tensor | None = None
        self._gradient: Tensor | None = None
        self._near: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (where it rests, beside the master)

    def attach(self, part: RestingSlice, gradients: UnitGradients, start: int, stop: int) -> None:
        """`part` is [start, stop) of what this rank owns of the unit."""
        unit = gradients.unit
        device = torch.device("cpu") if part.master.device.type == "meta" else part.master.device

        def low() -> Tensor:
            return self._beside(self.values(unit), start, stop, device)

        def grad() -> Tensor:
            if gradients.result is not None or not gradients.at_rest:  # nothing is at rest before the first step
                return part._grad.to(device)
            return self.gradient(gradients)[start:stop].to(device)

        part.attach(low if unit.rest is not None else None, grad)

    def values(self, unit: Unit) -> Tensor:
        """[own] of the unit's type, written back when it is closed."""
        self._move_to(unit)
        if self._values is None:
            self._values = self._stack.enter_context(unit.borrow_values(write=True))
        return self._values

    def gradient(self, gradients: UnitGradients) -> Tensor:
        """[own] of the accumulation type, for reading."""
        self._move_to(gradients.unit)
        if self._gradient is None:
            self._gradient = self._stack.enter_context(gradients.borrow_rested())
        return self._gradient

    def _beside(self, values: Tensor, start: int, stop: int, device: torch.device) -> Tensor:
        """Rules compute where the masters are; elsewhere the values follow on closing."""
        here = values[start:stop]
        if here.device == device:
            return here
        if (start, stop) not in self._near:
            self._near[start, stop] = (here, here.to(device))
        return self._near[start, stop][1]

    def _move_to(self, unit: Unit) -> None:
        if self._unit is unit:
            return
        self.close()
        self._unit = unit
        following = self._next.get(unit.index)
        if following is not None:
            following.unit.prefetch()
            following.prefetch_rested()

    def close(self) -> None:
        """Write back and give the memory back. Raises TierError."""
        for resting, near in self._near.values():
            resting.copy_(near)
        self._near, self._values, self._gradient, self._unit = {}, None, None, None
        stack, self._stack = self._stack, ExitStack()
        stack.close()
