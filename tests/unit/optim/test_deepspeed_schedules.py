"""The five schedules of DeepSpeed files against its formulas, transcribed counter by counter, and numbers by hand.

DeepSpeed's counter i is -1 before the first update; ours is the number of updates, i + 1.
"""

from __future__ import annotations

import math
import random

import pytest

from trilithon.config import Config
from trilithon.optim.learning_rate import configured

RATE = 0.7  # of the parameter group


def settings(name, params, updates, release="0.19", group=None):
    """What the file makes of the group, before each update."""
    block = {"train_batch_size": 1, "scheduler": {"type": name, "params": params}}
    schedule = Config.load(block, deepspeed_release=release).lr_schedule
    plan = configured(schedule, group or {"lr": RATE, "betas": (0.9, 0.999)}, 0, 1)
    return [plan(step) for step in range(updates)]


def rates(name, params, updates, release="0.19"):
    return [one["lr"] for one in settings(name, params, updates, release)]


# ------------------------------------------------------------------------------------------------ the formulas, plainly
def growth(i, warm, kind):
    return math.log(i + 1) / math.log(warm) if kind == "log" else i / warm


def warmup(i, p):
    low, high, warm = p.get("warmup_min_lr", 0.0), p.get("warmup_max_lr", RATE), max(2, p.get("warmup_num_steps", 1000))
    if i < 0:
        return low
    if i < warm:
        return low + (high - low) * growth(i, warm, p.get("warmup_type", "log"))
    return high


def warmup_decay(i, p):
    warm = max(2, p.get("warmup_num_steps", 1000))
    given = {"warmup_max_lr": 0.001, **p}
    low, high = given.get("warmup_min_lr", 0.0), given["warmup_max_lr"]
    if i < warm:
        return warmup(i, given)
    left = (p["total_num_steps"] - i) / max(1, p["total_num_steps"] - warm)
    return low + (high - low) * max(0.0, left)


def warmup_cosine(i, p, clamp=True):
    warm, least = max(2, p.get("warmup_num_steps", 1000)), p.get("cos_min_ratio", 0.0001)
    if i < 0:
        return 0.0
    if i < warm:
        start = p.get("warmup_min_ratio", 0.0)
        return RATE * (start + growth(i, warm, p.get("warmup_type", "log")) * (1 - start))
    way = (i - warm + 1) / max(1, p["total_num_steps"] - warm)
    way = min(1, way) if clamp else way
    return RATE * max(0.0, least + (1 - least) * (1 + math.cos(math.pi * way)) / 2)


def cycle(i, p, stairs=True):
    """(lr, first beta)"""
    s1 = p.get("cycle_first_step_size", 2000)
    s2 = p.get("cycle_second_step_size", s1)
    c1 = p.get("cycle_first_stair_count", 0) if stairs else 0
    c2 = p.get("cycle_second_stair_count", c1) if stairs else 0
    low, high, total = p["cycle_min_lr"], p["cycle_max_lr"], s1 + s2
    least, most = p.get("cycle_min_mom", 0.8), p.get("cycle_max_mom", 0.9)
    if i < total:
        position = (i + 1) % total
        rising = position <= s1
        offset, length, count = (position, s1, c1) if rising else (total - position, s2, c2)
        way = math.floor(offset * count / length) / count if count else offset / length
        return low + (high - low) * way, most - (most - least) * way
    each = p.get("decay_step_size", 0)
    elapsed = (i - total + 1) / each if each else 0.0
    return low / (1 + p.get("decay_lr_rate", 0) * elapsed), most * (1 + p.get("decay_mom_rate", 0) * elapsed)


def range_test(i, p):
    n = (i + 1) / p.get("lr_range_test_step_size", 2000)
    n = math.floor(n) if p.get("lr_range_test_staircase", False) else n
    return p.get("lr_range_test_min_lr", 0.001) * (1 + p.get("lr_range_test_step_rate", 1.0) * n)


def drawn(draw, **choices):
    """Each parameter with probability 3/4, so that defaults are met as well."""
    return {key: draw.choice(values) for key, values in choices.items() if draw.random() < 0.75}


WARM = {"warmup_num_steps": (1, 2, 3, 7), "warmup_type": ("log", "linear")}


@pytest.mark.parametrize("seed", range(25))
def test_warmups_follow_the_formulas(seed):
    draw = random.Random(seed)
    bounds = {"warmup_min_lr": (0, 0.01), "warmup_max_lr": (0.05, 0.3)}
    params = drawn(draw, **WARM, **bounds)
    assert rates("WarmupLR", params, 15) == pytest.approx([warmup(i, params) for i in range(-1, 14)], abs=1e-15)
    params = {**drawn(draw, **WARM, **bounds), "total_num_steps": draw.choice((1, 5, 12))}
    expected = [warmup_decay(i, params) for i in range(-1, 19)]
    assert rates("WarmupDecayLR", params, 20) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("release", ["0.19", "0.16"])
def test_cosines_follow_the_formula(seed, release):
    draw = random.Random(seed)
    params = drawn(draw, **WARM, warmup_min_ratio=(0, 0.25), cos_min_ratio=(0.1, 0.0))
    params["total_num_steps"] = draw.choice((1, 6, 12))
    expected = [warmup_cosine(i, params, clamp=release == "0.19") for i in range(-1, 39)]
    assert rates("WarmupCosineLR", params, 40, release) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("release", ["0.19", "0.16"])
def test_cycles_follow_the_formula(seed, release):
    draw = random.Random(seed)
    params = drawn(
        draw,
        cycle_first_step_size=(1, 4, 7),
        cycle_second_step_size=(2, 5),
        cycle_first_stair_count=(0, 2, 3),
        cycle_second_stair_count=(0, 4),
        decay_step_size=(0, 3),
        decay_lr_rate=(0, 0.5),
        cycle_min_mom=(0.7,),
        cycle_max_mom=(0.95,),
        decay_mom_rate=(0, 0.01),
    )
    params |= {"cycle_min_lr": 0.01, "cycle_max_lr": 0.2}
    params.setdefault("cycle_first_step_size", 3)
    found = settings("OneCycle", params, 25, release)
    expected = [cycle(i, params, stairs=release == "0.19") for i in range(-1, 24)]
    assert [one["lr"] for one in found] == pytest.approx([lr for lr, _ in expected], abs=1e-12)
    # the constructor puts the least first beta in place, which the first update uses (release 0.19.8, observed)
    first_betas = [params.get("cycle_min_mom", 0.8), *[first for _, first in expected[1:]]]
    assert [one["betas"] for one in found] == [(pytest.approx(first, abs=1e-12), 0.99) for first in first_betas]


@pytest.mark.parametrize("seed", range(10))
def test_range_tests_follow_the_formula(seed):
    draw = random.Random(seed)
    params = drawn(
        draw,
        lr_range_test_min_lr=(0.01, 0.5),
        lr_range_test_step_size=(1, 4),
        lr_range_test_step_rate=(0.5, 2.0),
        lr_range_test_staircase=(True, False),
    )
    assert rates("LRRangeTest", params, 12) == pytest.approx([range_test(i, params) for i in range(-1, 11)], abs=1e-12)


# ------------------------------------------------------------------------------------------------------------ by hand
def test_numbers_worked_out_by_hand():
    ln2, ln3, ln4 = math.log(2), math.log(3), math.log(4)
    warm = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4}
    assert rates("WarmupLR", warm, 7) == pytest.approx(
        [0.1, 0.1, 0.1 + 0.4 * ln2 / ln4, 0.1 + 0.4 * ln3 / ln4, 0.5, 0.5, 0.5]  # the first two updates use the minimum
    )
    warm |= {"warmup_type": "linear", "total_num_steps": 8}
    assert rates("WarmupDecayLR", warm, 11) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1])
    cosine = {"warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear", "cos_min_ratio": 0.0}
    held = [0.0, 0.0, 0.35, 0.35, 0.0, 0.0, 0.0, 0.0]
    assert rates("WarmupCosineLR", cosine, 8) == pytest.approx(held, abs=1e-15)
    swings = [0.0, 0.0, 0.35, 0.35, 0.0, 0.35, 0.7, 0.35]
    assert rates("WarmupCosineLR", cosine, 8, release="0.16") == pytest.approx(swings, abs=1e-15)
    stairs = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_first_stair_count": 2}
    assert rates("OneCycle", stairs, 10) == [0.0, 0.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0]
    assert rates("OneCycle", stairs, 10, release="0.16") == [0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_a_group_without_betas_keeps_out_of_the_momentum_and_says_so(caplog):
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0}
    assert "betas" not in settings("OneCycle", params, 1, group={"lr": RATE})[0]
    assert "cycle_momentum has no effect" in caplog.text
    assert "betas" not in settings("OneCycle", {**params, "cycle_momentum": False}, 1)[0]
