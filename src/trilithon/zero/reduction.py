"""In which order units are reduced during backward, and how much may be in flight.

Every rank launches reductions in one fixed order, whatever the order in which its own gradients appear: first the
reverse order of construction, then, once the first backward has shown it, the order seen by rank 0. A unit that is
complete waits for its predecessors; what is incomplete when backward ends is reduced then. So exactly one reduction per
unit and backward is issued on every rank, and no rank can wait for one that another never issues.

Waiting inside backward is only ever a courtesy that bounds memory: it gives up after `PATIENCE_S`, since a peer may be
unable to issue its part before its own backward ends (a parameter without gradient there).
(Bucketing and overlap: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.2.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from trilithon.contracts import Collectives, Tag
from trilithon.zero.gradients import UnitGradients

PATIENCE_S = 1.0
IN_FLIGHT = 2  # reductions under way at the same time before backward pauses, with overlap


class ReductionQueue:
    """Launches the reductions of all trainable units in one agreed order."""

    def __init__(
        self, gradients: Sequence[UnitGradients], control: Collectives, *, overlap: bool, may_block: bool
    ) -> None:
        self._gradients = list(gradients)
        self._control = control
        self._may_block = may_block
        self._allowed = IN_FLIGHT if overlap else 0
        self._order = list(range(len(self._gradients)))[::-1]
        self._learned = control.world_size == 1
        self._seen: list[int] = []
        self._next = 0
        self._reduce = False
        self._flying: deque[UnitGradients] = deque()
        self._patient = True
        self._at = (-1, -1)

    def begin_backward(self, *, reduce: bool, step: int, micro_step: int) -> None:
        self._reduce, self._next, self._patient, self._seen = reduce, 0, True, []
        self._at = (step, micro_step)
        for gradients in self._gradients:
            gradients.begin_backward()

    def complete(self, index: int) -> None:
        """Unit `index` has all that it expects in this backward."""
        self._seen.append(index)
        if self._reduce:
            self._advance(flush=False)

    def finish_backward(self) -> None:
        """Reduce what is left, in order, and wait for everything."""
        if self._reduce:
            self._advance(flush=True)
            while self._flying:
                self._flying.popleft().land()
            if not self._learned:
                self._learn()
        for gradients in self._gradients:
            gradients.end_backward()

    def flush_late(self, indices: Sequence[int]) -> None:
        """Reduce these units once more, in order; every rank must name the same ones."""
        for index in sorted(indices):
            self._gradients[index].launch(self._tag(index))
        for index in sorted(indices):
            self._gradients[index].land()

    def _advance(self, *, flush: bool) -> None:
        while self._next < len(self._order):
            index = self._order[self._next]
            gradients = self._gradients[index]
            if not flush and not gradients.complete():
                return
            gradients.launch(self._tag(index))
            self._flying.append(gradients)
            self._next += 1
            if not flush:
                self._make_room()

    def _make_room(self) -> None:
        while len(self._flying) > self._allowed:
            oldest = self._flying[0]
            give_up = time.monotonic() + PATIENCE_S
            while not (self._may_block or oldest.done()):
                if not self._patient or time.monotonic() > give_up:
                    self._patient = False
                    return
                time.sleep(0.0001)
            self._flying.popleft().land()

    def _tag(self, index: int) -> Tag:
        return self._gradients[index].unit.tag(*self._at)

    def _learn(self) -> None:
        """Once: take the order in which rank 0 completed its units; those it never completed come last."""
        seen = self._control.all_gather_object(self._seen, Tag("reduction order", step=self._at[0]))[0]
        first = list(dict.fromkeys(seen))
        self._order = first + [index for index in self._order if index not in set(first)]
        self._learned = True
