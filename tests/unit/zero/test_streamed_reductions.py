"""Reductions on a device's stream are landed once they have arrived, and backward never queues behind one that has not.

The device is played by objects that say when they are done; no GPU is needed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trilithon.zero import reduction
from trilithon.zero.reduction import ReductionQueue


class Reduced:
    """Stands in for the gradients of one unit on a GPU."""

    def __init__(self, log: list[str], name: str, *, arrives: bool) -> None:
        self.unit = SimpleNamespace(flat=SimpleNamespace(is_cuda=True), tag=lambda *_: None)
        self._log, self._name, self._arrives = log, name, arrives

    def begin_backward(self) -> None: ...

    def end_backward(self) -> None: ...

    def complete(self) -> bool:
        return True

    def launch(self, tag: object) -> None:
        self._log.append(f"launch {self._name}")

    def done(self) -> bool:
        return self._arrives

    def land(self) -> None:
        self._log.append(f"land {self._name}")

    def lay_down(self) -> None: ...


def in_backward(monkeypatch: pytest.MonkeyPatch, *, arrives: bool) -> tuple[list[str], list[str]]:
    """What happened before and after the end of a backward over four units."""
    monkeypatch.setattr(reduction, "PATIENCE_S", 0.01)
    log: list[str] = []
    units: list[Any] = [Reduced(log, name, arrives=arrives) for name in "dcba"]  # the order is that of construction
    control: Any = SimpleNamespace(world_size=1)
    queue = ReductionQueue(units, control, overlap=True, may_block=False)
    queue.begin_backward(reduce=True, step=1, micro_step=0)
    for index in (3, 2, 1, 0):
        queue.complete(index)
    before = list(log)
    queue.finish_backward()
    return before, log[len(before) :]


def test_what_has_arrived_is_landed_so_that_one_stays_in_flight(monkeypatch):
    before, after = in_backward(monkeypatch, arrives=True)
    assert before == ["launch a", "launch b", "land a", "launch c", "land b", "launch d", "land c"]
    assert after == ["land d"]


def test_what_has_not_arrived_is_left_until_backward_ends(monkeypatch):
    before, after = in_backward(monkeypatch, arrives=False)
    assert before == ["launch a", "launch b", "launch c", "launch d"]
    assert after == ["land a", "land b", "land c", "land d"]
