"""Schedules: the value at both ends, in the middle, beyond the end, and where two are joined."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from trilithon import schedules


@pytest.mark.parametrize(
    "make",
    [
        schedules.linear,
        schedules.cosine,
        lambda a, b, n: schedules.polynomial(a, b, n, power=3.0),
        lambda a, b, n: schedules.polynomial(a, b, n, power=0.5),
        schedules.root,
        lambda a, b, n: schedules.root(a, b, n, degree=3.0),
    ],
)
@pytest.mark.parametrize("start,end", [(0.1, 0.7), (0.7, 0.1), (1e-3, 0.0)])
def test_ramps_start_and_end_exactly_move_one_way_and_stay(make: object, start: float, end: float) -> None:
    schedule = make(start, end, 7)  # type: ignore[operator]
    values = [schedule(step) for step in range(12)]
    assert values[0] == start
    assert values[7:] == [end] * 5
    steps = [b - a for a, b in pairwise(values[:8])]
    assert all(step * (end - start) > 0 for step in steps)


def test_values_in_the_middle() -> None:
    assert schedules.linear(0.0, 1.0, 4)(1) == 0.25
    assert schedules.polynomial(1.0, 0.0, 4, power=2.0)(1) == 0.5625
    assert schedules.root(0.0, 8.0, 4)(1) == 4.0
    assert schedules.root(0.0, 8.0, 8, degree=3.0)(1) == pytest.approx(4.0)
    assert schedules.cosine(1.0, 0.0, 4)(1) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert schedules.constant(3.0)(10**9) == 3.0
    assert schedules.scaled(schedules.linear(0.0, 1.0, 4), 8.0)(1) == 2.0


def test_exponential_decays_to_its_floor() -> None:
    assert [schedules.exponential(8.0, 0.5, floor=2.5)(step) for step in range(4)] == [8.0, 4.0, 2.5, 2.5]


def test_piecewise_changes_at_its_boundaries() -> None:
    schedule = schedules.piecewise([2, 5], [1.0, 0.1, 0.01])
    assert [schedule(step) for step in range(7)] == [1.0, 1.0, 0.1, 0.1, 0.1, 0.01, 0.01]
    assert schedules.piecewise([], [4.0])(3) == 4.0


def test_one_cycle_rises_falls_and_stays_low() -> None:
    schedule = schedules.one_cycle(1.0, 5.0, rise_steps=4, fall_steps=2)
    assert [schedule(step) for step in range(9)] == [1.0, 2.0, 3.0, 4.0, 5.0, 3.0, 1.0, 1.0, 1.0]


def test_join_counts_each_part_from_zero_and_ends_with_the_last() -> None:
    warm, hold = schedules.linear(0.0, 1.0, 2), schedules.constant(1.0)
    decay = schedules.linear(1.0, 0.0, 4)
    schedule = schedules.join([(2, warm), (3, hold)], decay)
    assert [schedule(step) for step in range(10)] == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    endless = schedules.join([(2, warm), (3, decay)])
    assert [endless(step) for step in range(7)] == [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    skipped = schedules.join([(0, warm)], hold)
    assert skipped(0) == 1.0


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: schedules.linear(0.0, 1.0, 0), "steps must be greater than 0, got 0"),
        (lambda: schedules.polynomial(0.0, 1.0, 3, power=-1.0), "power must be greater than 0"),
        (lambda: schedules.root(0.0, 1.0, 3, degree=0.0), "degree must be greater than 0"),
        (lambda: schedules.exponential(1.0, 0.0), "gamma must be greater than 0"),
        (lambda: schedules.piecewise([1], [1.0]), "1 boundaries need 2 values, got 1"),
        (lambda: schedules.piecewise([3, 3], [1.0, 2.0, 3.0]), "must rise"),
        (lambda: schedules.join([]), "at least one"),
        (lambda: schedules.join([(-1, schedules.constant(1.0))]), "cannot last -1 steps"),
    ],
)
def test_what_makes_no_schedule_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
