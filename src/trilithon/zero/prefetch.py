"""The recorded order in which units are gathered, and what comes next. Pure.

One pass is a step's forwards and backwards (training) or one forward (without gradients). While a pass repeats the one
before, `follow` yields what the older pass did next; at the first difference it yields nothing more, and the newer pass
becomes the record. Nothing here ever fails: a changing model only loses read-ahead.
(Rajbhandari et al. 2021, arXiv:2104.07857, section 6.2.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice


class Trace:
    """Records passes of unit indices and predicts from the last whole one."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._running: list[int] = []
        self._agrees = True

    def restart(self) -> None:
        """A new pass begins; the pass that ends becomes the record, unless nothing was gathered in it."""
        if self._running:
            self._known = self._running
        self._running, self._agrees = [], True

    def follow(self, index: int) -> Iterator[int]:
        """Unit `index` is gathered now; the units that the recorded pass gathered after it, in order."""
        at = len(self._running)
        self._running.append(index)
        self._agrees = self._agrees and at < len(self._known) and self._known[at] == index
        return islice(self._known, at + 1, None) if self._agrees else iter(())
