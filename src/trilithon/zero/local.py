"""Gradients that nobody averages: they stay where they were computed, and the update rule communicates instead.

At stages 0 and 1 a rank keeps whole gradients until the boundary anyway, so here they are simply not reduced. Several
backwards of a window add up as always. Before anything is touched the ranks agree on the same numbers as they do on an
averaged gradient, with one difference: no rank has the mean, so its norm is estimated from random projections, which
are averaged in its stead (`projection`). The root mean square over ranks of the local norms, which is never smaller,
bounds it: clipping by that one instead would make every update smaller as soon as the uncompressed phase is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trilithon.zero.agreement import Agreement, Settled
from trilithon.zero.gradients import UnitGradients
from trilithon.zero.projection import LENGTH, projection
from trilithon.zero.unit import Unit


class LocalGradients:
    """The local gradients of all trainable units on this rank."""

    def __init__(self, gradients: Sequence[UnitGradients], agree: Agreement, world_size: int) -> None:
        self._gradients, self._agree, self._world_size = gradients, agree, world_size
        self._idle: frozenset[str] = frozenset()

    def settle(self, extra: Sequence[float], step: int, micro_step: int) -> Settled:
        """Agree on norm, idle parameters and the caller's numbers. Collective; changes no gradient."""
        squares = sum(one.keep_local() for one in self._gradients)
        missing = sum(not all(one.used) for one in self._gradients)
        products = self._products(step) if self._world_size > 1 else []
        agreed = self._agree.sum([squares, float(missing), *products, *extra], "local gradient norm")
        self._idle = self._agree.idle(self._gradients) if agreed[1] > 0 else frozenset()
        squares, products = agreed[0] / self._world_size, agreed[2 : 2 + len(products)]
        if products and math.isfinite(squares):
            squares = min(squares, math.fsum(one * one for one in products) / self._world_size**2)
        return Settled(squares, self._idle, tuple(agreed[2 + len(products) :]))

    def _products(self, step: int) -> list[float]:
        total = torch.zeros(LENGTH, dtype=torch.float64)
        for one in self._gradients:
            assert one.local is not None
            total += projection(one.local, one.unit.name, step)
        return [float(value) for value in total.tolist()]

    def shapes(self) -> dict[str, torch.Size]:
        """Of whole parameters, by name."""
        return {field.name: torch.Size(field.shape) for one in self._gradients for field in one.unit.layout.fields}

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, flat local gradient as stored) of every parameter that has one on any rank; zero where it has none."""
        for one in self._gradients:
            local = one.local
            assert local is not None, "settle() comes first"
            for field in one.unit.layout.fields:
                if field.name not in self._idle:
                    yield field.name, local[field.start : field.stop]

    def mean(self, unit: Unit, step: int) -> Tensor | None:
        """Collective: what this rank owns of the mean over ranks, which costs what compression saves."""
        found = next((one for one in self._gradients if one.unit is unit), None)
        return found.mean_of_local(unit.tag(step)) if found is not None else None
