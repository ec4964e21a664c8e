"""Everything that varies with training, as a function from step to value.

A schedule is any callable from a step to a number; steps count from 0, so the first update of a run uses the value at
step 0. The functions here make the usual ones: learning rates, sequence lengths of a curriculum, drop probabilities,
sparsity and bit widths all come from this file. Values are floats; round them where a whole number is meant.
All schedules are pure: the value depends on the step alone, so resuming means asking for a later step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

Schedule = Callable[[int], float]


def constant(value: float) -> Schedule:
    """The same value at every step."""
    return lambda step: value


def linear(start: float, end: float, steps: int) -> Schedule:
    """From `start` at step 0 along a line to `end` at step `steps`, and `end` from there on."""
    return polynomial(start, end, steps, power=1.0)


def polynomial(start: float, end: float, steps: int, power: float) -> Schedule:
    """end + (start - end) * (1 - step / steps)^power up to `steps`, then `end`. Fast first if power > 1."""
    _positive("steps", steps)
    _positive("power", power)

    def value(step: int) -> float:
        share = _share(step, steps)
        return start if share == 0.0 else end + (start - end) * (1.0 - share) ** power

    return value


def root(start: float, end: float, steps: int, degree: float = 2.0) -> Schedule:
    """start + (end - start) * (step / steps)^(1 / degree) up to `steps`, then `end`.

    The competence schedule of Platanios et al. 2019 (arXiv:1903.09848, section 2.2); degree 2 is a square root.
    """
    _positive("steps", steps)
    _positive("degree", degree)

    def value(step: int) -> float:
        share = _share(step, steps)
        return end if share == 1.0 else start + (end - start) * share ** (1.0 / degree)

    return value


def cosine(start: float, end: float, steps: int) -> Schedule:
    """Half a cosine from `start` at step 0 to `end` at step `steps`, then `end`.

    Loshchilov and Hutter 2017 (arXiv:1608.03983, section 3), without restarts.
    """
    _positive("steps", steps)

    def value(step: int) -> float:
        share = _share(step, steps)
        if share in (0.0, 1.0):  # exactly, where the formula would round
            return end if share else start
        return end + (start - end) * (1.0 + math.cos(math.pi * share)) / 2.0

    return value


def exponential(start: float, gamma: float, floor: float = 0.0) -> Schedule:
    """start * gamma^step, but never below `floor`."""
    _positive("gamma", gamma)
    return lambda step: max(start * gamma**step, floor)


def piecewise(boundaries: Sequence[int], values: Sequence[float]) -> Schedule:
    """values[k] from boundaries[k - 1] (inclusive) until boundaries[k]; one value more than boundaries, which rise."""
    if len(values) != len(boundaries) + 1:
        raise ValueError(f"{len(boundaries)} boundaries need {len(boundaries) + 1} values, got {len(values)}")
    if any(b <= a for a, b in pairwise(boundaries)):
        raise ValueError(f"boundaries must rise, got {list(boundaries)}")
    return lambda step: values[bisect_right(boundaries, step)]


def one_cycle(low: float, high: float, rise_steps: int, fall_steps: int) -> Schedule:
    """`low` to `high` along a line in `rise_steps`, back in `fall_steps`, then `low` (Smith 2018, arXiv:1803.09820)."""
    return join([(rise_steps, linear(low, high, rise_steps)), (fall_steps, linear(high, low, fall_steps))])


def join(parts: Sequence[tuple[int, Schedule]], last: Schedule | None = None) -> Schedule:
    """Each part for its number of steps, counted from 0 within the part; then `last`, or the last part going on."""
    if not parts:
        raise ValueError("join needs at least one (steps, schedule) pair")
    starts = [0]
    for steps, _ in parts:
        if steps < 0:
            raise ValueError(f"a part of a joined schedule cannot last {steps} steps")
        starts.append(starts[-1] + steps)
    schedules = [schedule for _, schedule in parts]
    if last is None:
        starts.pop()
    else:
        schedules.append(last)

    def value(step: int) -> float:
        index = max(bisect_right(starts, step) - 1, 0)
        return schedules[index](step - starts[index])

    return value


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """`factor` times the values of `schedule`."""
    return lambda step: factor * schedule(step)


def _share(step: int, steps: int) -> float:
    """How much of `steps` has passed, within [0, 1]."""
    return min(max(step / steps, 0.0), 1.0)


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be greater than 0, got {value!r}")
