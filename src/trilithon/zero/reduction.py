"""In which order units are reduced during backward, and how much may be in flight.

Every rank launches reductions in one fixed order, whatever the order in which its own gradients appear: first the
reverse order of construction, then, once the first backward has shown it, the order seen by rank 0. A unit that is
complete waits for its predecessors; what is incomplete when backward ends is reduced then. So exactly one reduction per
unit and backward is issued on every rank, and no rank can wait for one that another never issues.

Waiting inside backward bounds memory. With gathers in the same backward (stage 3) it is only ever a courtesy, done by
a thread of its own and given up after `PATIENCE_S`: a peer may be unable to issue its part before its own backward ends
(a parameter without gradient there), and may need this rank's gathers to get that far. On CUDA waiting would not block
this program but the stream on which the gathers queue up, with the same end; there the device is asked instead, and a
unit is landed once it has arrived.
(Bucketing and overlap: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.2.)
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

from trilithon.contracts import Collectives, Tag
from trilithon.zero.gradients import UnitGradients

PATIENCE_S = 1.0
_ASK_EVERY_S = 5e-5
IN_FLIGHT = 1  # reductions under way at the same time before backward pauses, with overlap


class _Landing:
    """One wait for a unit's reductions, to be done by any thread."""

    def __init__(self, gradients: UnitGradients) -> None:
        self._gradients, self._landed = gradients, threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._gradients.land()
        except BaseException as error:  # raised again where it is waited for
            self._error = error
        self._landed.set()

    def wait(self, seconds: float | None = None) -> bool:
        landed = self._landed.wait(seconds)
        if self._error is not None:
            raise self._error
        return landed


class _Lander:
    """A daemon thread that waits for reductions in turn, so that backward can stop waiting when it must."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Landing | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name="trilithon-reductions", daemon=True).start()

    def take(self, gradients: UnitGradients) -> _Landing:
        landing = _Landing(gradients)
        self._jobs.put(landing)
        return landing

    def close(self) -> None:
        self._jobs.put(None)

    __del__ = close


def _work(jobs: queue.SimpleQueue[_Landing | None]) -> None:
    while (landing := jobs.get()) is not None:
        landing.run()
        del landing


def _land(gradients: UnitGradients) -> None:
    """In the thread of the program, which alone talks to stores."""
    gradients.land()
    gradients.lay_down()


class ReductionQueue:
    """Launches the reductions of all trainable units in one agreed order."""

    def __init__(
        self, gradients: Sequence[UnitGradients], control: Collectives, *, overlap: bool, may_block: bool
    ) -> None:
        self._gradients = list(gradients)
        self._control = control
        self._may_block = may_block
        self._streamed = any(one.unit.flat.is_cuda for one in self._gradients)
        self._allowed = IN_FLIGHT if overlap else 0
        self._order = list(range(len(self._gradients)))[::-1]
        self._learned = control.world_size == 1
        self._seen: list[int] = []
        self._next = 0
        self._reduce = False
        self._flying: deque[UnitGradients] = deque()
        self._patient = True
        self._lander: _Lander | None = None
        self._landing: _Landing | None = None  # of the oldest in flight
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
            if self._landing is not None:
                self._landing.wait()
                self._landing = None
            while self._flying:
                _land(self._flying.popleft())
            if not self._learned:
                self._learn()
        for gradients in self._gradients:
            gradients.end_backward()

    def abandon(self) -> None:
        """Wait for what an interrupted backward launched; nobody wants its results."""
        if self._landing is not None:
            self._landing.wait()
            self._landing = None
        while self._flying:
            self._flying.popleft().land()

    def close(self) -> None:
        self.abandon()
        if self._lander is not None:
            self._lander.close()
            self._lander = None

    def flush_late(self, indices: Sequence[int]) -> None:
        """Reduce these units once more, in order; every rank must name the same ones."""
        for index in sorted(indices):
            self._gradients[index].launch(self._tag(index))
        for index in sorted(indices):
            _land(self._gradients[index])

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
            if self._may_block:
                _land(self._flying.popleft())
                continue
            if self._streamed:
                if not self._arrived(self._flying[0]):
                    return
                _land(self._flying.popleft())
                continue
            if self._lander is None:
                self._lander = _Lander()
            if self._landing is None:
                self._landing = self._lander.take(self._flying[0])
            if not self._landing.wait(PATIENCE_S if self._patient else 0.0):
                self._patient = False
                return
            self._landing = None
            self._flying.popleft().lay_down()

    def _arrived(self, gradients: UnitGradients) -> bool:
        """Whether the reduction has arrived, asked for as long as patience lasts in this backward."""
        until = time.monotonic() + (PATIENCE_S if self._patient else 0.0)
        while not gradients.done():
            if time.monotonic() >= until:
                self._patient = False
                return False
            time.sleep(_ASK_EVERY_S)
        return True

    def _tag(self, index: int) -> Tag:
        return self._gradients[index].unit.tag(*self._at)

    def _learn(self) -> None:
        """Once: take the order in which rank 0 completed its units; those it never completed come last."""
        seen = self._control.all_gather_object(self._seen, Tag("reduction order", step=self._at[0]))[0]
        first = list(dict.fromkeys(seen))
        self._order = first + [index for index in self._order if index not in set(first)]
        self._learned = True
