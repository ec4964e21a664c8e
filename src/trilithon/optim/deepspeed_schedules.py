"""The five learning-rate schedules that DeepSpeed files name, by the formulas that published DeepSpeed uses.

Each function here gives the settings of one parameter group at a step; steps count from 0, and step s is the value that
DeepSpeed uses at its own counter i = s - 1, so that the first update uses the value from before its first `step()`.
Rates may be one number, or one per group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from trilithon.errors import ConfigError

WarmupType = Literal["log", "linear"]
Rate = float | Sequence[float]
GroupSettings = dict[str, float | tuple[float, float]]
GroupSchedule = Callable[[int], GroupSettings]


def rate_of(rate: Rate, group: int, groups: int, key: str) -> float:
    """`rate`, or its entry of group `group` if it is a list; raises ConfigError for another length."""
    if isinstance(rate, (int, float)):
        return float(rate)
    if len(rate) != groups:
        raise ConfigError(
            f"lr_schedule.{key} has {len(rate)} entries for {groups} parameter groups; give one number, or one "
            "per group."
        )
    return float(rate[group])


def _warmup_share(i: int, steps: int, kind: WarmupType) -> float:
    """From 0 at i = 0 towards 1 at i = steps; `steps` is at least 2."""
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


def warmup_lr(low: float, high: float, num_steps: int, kind: WarmupType = "log") -> GroupSchedule:
    """`low`, rising to `high` over `num_steps` (at least 2), then `high`."""
    steps = max(2, num_steps)

    def settings(step: int) -> GroupSettings:
        i = step - 1
        if i < 0:
            return {"lr": low}
        if i >= steps:
            return {"lr": high}
        return {"lr": low + (high - low) * _warmup_share(i, steps, kind)}

    return settings


def warmup_decay_lr(
    low: float, high: float, num_steps: int, total_num_steps: int, kind: WarmupType = "log"
) -> GroupSchedule:
    """As `warmup_lr`, then along a line back to `low` at `total_num_steps`."""
    steps = max(2, num_steps)
    rise = warmup_lr(low, high, num_steps, kind)

    def settings(step: int) -> GroupSettings:
        i = step - 1
        if i < steps:
            return rise(step)
        left = max(0.0, (total_num_steps - i) / max(1.0, total_num_steps - steps))
        return {"lr": low + (high - low) * left}

    return settings


def warmup_cosine_lr(
    base_lr: float,
    *,
    num_steps: int,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    cos_min_ratio: float = 1e-4,
    kind: WarmupType = "log",
    swing: bool = False,
) -> GroupSchedule:
    """base_lr times a ratio: 0 first, from warmup_min_ratio to 1, then half a cosine down to cos_min_ratio.

    swing: the cosine goes on after `total_num_steps`, up and down, where it otherwise stays at its end.
    """
    steps = max(2, num_steps)

    def settings(step: int) -> GroupSettings:
        i = step - 1
        if i < 0:
            return {"lr": 0.0}
        if i < steps:
            ratio = warmup_min_ratio + _warmup_share(i, steps, kind) * (1.0 - warmup_min_ratio)
            return {"lr": base_lr * ratio}
        share = (i - steps + 1) / max(1, total_num_steps - steps)
        share = share if swing else min(1.0, share)
        ratio = cos_min_ratio + (1.0 - cos_min_ratio) * (1.0 + math.cos(math.pi * share)) / 2.0
        return {"lr": base_lr * max(0.0, ratio)}

    return settings


def lr_range_test(low: float, step_size: int, step_rate: float, staircase: bool) -> GroupSchedule:
    """low * (1 + step_rate * n) with n = step / step_size, whole steps of it only if `staircase`."""

    def settings(step: int) -> GroupSettings:
        n = step // step_size if staircase else step / step_size
        return {"lr": low * (1.0 + step_rate * n)}

    return settings


def one_cycle(
    low: float,
    high: float,
    *,
    rise_steps: int,
    fall_steps: int | None = None,
    rise_stairs: int = 0,
    fall_stairs: int | None = None,
    decay_step_size: int = 0,
    decay_lr_rate: float = 0.0,
    momentum: tuple[float, float] | None = None,
    decay_mom_rate: float = 0.0,
) -> GroupSchedule:
    """One rise of the rate from `low` to `high` and fall back, then decay.

    momentum: (least, greatest) first beta, which moves against the rate, with a second beta of 0.99; None leaves the
    group's betas alone. Before its first `step()` DeepSpeed has the least one in place, so that the first update uses
    it. Stair counts above 0 quantise the share of the way.
    """
    fall_steps = rise_steps if fall_steps is None else fall_steps
    fall_stairs = rise_stairs if fall_stairs is None else fall_stairs
    cycle = rise_steps + fall_steps

    def share_of_way(position: int) -> float:
        if position <= rise_steps:
            offset, length, stairs = position, rise_steps, rise_stairs
        else:
            offset, length, stairs = cycle - position, fall_steps, fall_stairs
        return (offset * stairs // length) / stairs if stairs > 0 else offset / length

    def settings(step: int) -> GroupSettings:
        decayed = step > cycle  # DeepSpeed's counter i = step - 1 has reached the cycle's length
        share = 0.0 if decayed else share_of_way(step % cycle)
        elapsed = (step - cycle) / decay_step_size if decayed and decay_step_size else 0.0
        result: GroupSettings = {"lr": (low + (high - low) * share) / (1.0 + decay_lr_rate * elapsed)}
        if momentum is not None:
            least, greatest = momentum
            first = (greatest - (greatest - least) * share) * (1.0 + decay_mom_rate * elapsed)
            result["betas"] = (first if step else least, 0.99)
        return result

    return settings
