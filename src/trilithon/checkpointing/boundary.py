"""The edges of recomputed blocks: waiting for the device there, and measuring what lies between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Times:
    """Of one block: calls and seconds of its forwards, and of the forwards that backward asked for."""

    calls: int = 0
    forward_s: float = 0.0
    again: int = 0
    again_s: float = 0.0


class Boundary:
    """Both ends of each forward of a block, first or repeated.

    synchronize: wait there until the device is done, so that no work of a neighbour overlaps. profile: measure the time
    between the ends, which waits as well.
    """

    def __init__(self, *, synchronize: bool = False, profile: bool = False) -> None:
        self._waits, self._profile = synchronize or profile, profile
        self.times: dict[Hashable, Times] = {}

    @contextmanager
    def around(self, block: Hashable, *, again: bool) -> Iterator[None]:
        if not self._waits:
            yield
            return
        wait_for_device()
        begin = time.perf_counter()
        try:
            yield  # a repeated forward is left by an exception as soon as backward has all it needs
        finally:
            wait_for_device()
            if self._profile:
                self._count(block, time.perf_counter() - begin, again)

    def _count(self, block: Hashable, seconds: float, again: bool) -> None:
        times = self.times.setdefault(block, Times())
        if again:
            times.again += 1
            times.again_s += seconds
        else:
            times.calls += 1
            times.forward_s += seconds

    def total(self) -> Times:
        """Of all blocks together."""
        total = Times()
        for times in self.times.values():
            total.calls += times.calls
            total.forward_s += times.forward_s
            total.again += times.again
            total.again_s += times.again_s
        return total


def wait_for_device() -> None:
    """Until the current accelerator has done everything; a CPU always has."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class ReportTimes:
    """A step hook: what recomputation took in the step before, through logging (level INFO) on rank 0."""

    def __init__(self, boundary: Boundary, rank: int) -> None:
        self._boundary, self._rank = boundary, rank
        self._before = Times()

    def on_step(self, step: int) -> None:
        now, before = self._boundary.total(), self._before
        self._before = now
        if now.calls > before.calls and self._rank == 0:
            logger.info(
                "step %d: %d forwards of recomputed blocks in %.4f s, %d of them again in backward in %.4f s",
                step - 1,
                now.calls - before.calls,
                now.forward_s - before.forward_s,
                now.again - before.again,
                now.again_s - before.again_s,
            )
