"""Gradients that are averaged over ranks during backward: what is still to be reduced, and what all agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trilithon.zero.agreement import Agreement, Settled
from trilithon.zero.composite import Places
from trilithon.zero.gradients import UnitGradients
from trilithon.zero.reduction import ReductionQueue


class AveragedGradients:
    """The reduced gradients of all trainable units; the counterpart of `local.LocalGradients`."""

    def __init__(  # noqa: PLR0917 (made once, by the sharding)
        self,
        gradients: Sequence[UnitGradients],
        agree: Agreement,
        reductions: ReductionQueue,
        places: Places,
        require_rest: Callable[[str], None],
        alike: Agreement,
    ) -> None:
        """require_rest(what): raises on all ranks alike if what rests off the device has failed on one. alike: over the
        ranks that hold the same units."""
        self._gradients, self._agree, self._queue, self._places = gradients, agree, reductions, places
        self._alike = alike
        self._require_rest = require_rest

    def settle(self, extra: Sequence[float], step: int, micro_step: int) -> Settled:
        """Reduce what came late, and agree on norm, idle parameters and the caller's numbers. Collective."""
        missing = [not all(gradients.used) for gradients in self._gradients]
        self._require_rest("keeping parameters and gradients off the device")
        numbers = [self._squared_norm(), float(sum(missing)), self._count_dirty(), *extra]
        agreed = self._agree.sum(numbers, "gradient norm")
        if agreed[2] > 0:
            dirty = self._alike.any_rank([g.dirty or not g.reduced for g in self._gradients], "late gradients")
            self._queue.flush_late([index for index, late in enumerate(dirty) if late])
            self._require_rest("keeping gradients off the device")
            agreed[0] = self._agree.sum([self._squared_norm()], "gradient norm")[0]
        idle = self._agree.idle(self._gradients) if agreed[1] > 0 else frozenset()
        handles = [g.spread(g.unit.tag(step, micro_step)) for g in self._gradients]
        for handle in handles:
            if handle is not None:
                handle.wait()
        return Settled(agreed[0], idle, tuple(agreed[3:]))

    def _squared_norm(self) -> float:
        """Of the part that this rank has reduced: every element counts on exactly one rank."""
        total = 0.0
        for gradients in self._gradients:
            replicas = self._places.of_unit[gradients.unit]
            whole = gradients.unit.own == (0, gradients.unit.layout.padded)
            owned = slice(*gradients.unit.layout.owned(replicas.rank)) if whole else slice(None)
            squares = gradients.squared_norm(owned)
            total += squares if replicas.counted == 1 else squares / replicas.counted
        return total

    def _count_dirty(self) -> float:
        return float(sum(gradients.dirty or not gradients.reduced for gradients in self._gradients))
