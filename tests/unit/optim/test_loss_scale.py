"""Loss scaling: golden traces, a model of a dozen lines, bounds, giving up, and policies without a scale."""

from __future__ import annotations

import random

import pytest

from trilithon.errors import CheckpointError, NonFiniteError
from trilithon.optim.loss_scale import DynamicScale, NoScale, StaticScale

OVERFLOWS = [1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
NORMAL = [1024, 512, 512, 512, 512, 512, 1024, 1024, 1024, 512, 256, 256, 256, 256, 256, 512, 512, 512, 512]
CONSECUTIVE = [1024, 512, 512, 512, 512, 512, 1024, 1024, 1024, 1024, 512, 512, 512, 512, 512, 1024, 1024, 1024, 1024]


@pytest.mark.parametrize("consecutive,golden", [(False, NORMAL), (True, CONSECUTIVE)])
def test_golden_trace(consecutive: bool, golden: list[int]) -> None:
    scale = DynamicScale(1024, window=4, hysteresis=2, consecutive_hysteresis=consecutive)
    trace = []
    for overflow in OVERFLOWS:
        assert scale.accept(not overflow) is not bool(overflow)
        trace.append(scale.scale)
    assert trace == golden
    assert scale.non_finite == sum(OVERFLOWS)


def reference(
    overflows: list[bool], *, window: int, hysteresis: int, consecutive: bool, low: float, high: float
) -> list[float]:
    """The rule as it is written down, with no bookkeeping beside it."""
    c, last, left, trace = 2.0**10, -1, hysteresis, []
    for i, overflow in enumerate(overflows):
        if overflow:
            if left == 1:
                c = max(c / 2, low)
            else:
                left -= 1
            last = i
        else:
            left = hysteresis if consecutive else left
            clean = i - last - 1  # steps without overflow before this one
            if clean > 0 and clean % window == 0:
                left, c = hysteresis, min(c * 2, high)
        trace.append(c)
    return trace


@pytest.mark.parametrize("seed", range(20))
def test_random_sequences_follow_the_rule(seed: int) -> None:
    draw = random.Random(seed)
    window, hysteresis, consecutive = draw.randint(1, 7), draw.randint(1, 4), draw.random() < 0.5
    overflows = [draw.random() < 0.3 for _ in range(300)]
    scale = DynamicScale(
        2.0**10,
        window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_scale=4.0,
        max_scale=2.0**13,
        give_up_after=10_000,
    )
    trace = []
    for overflow in overflows:
        scale.accept(not overflow)
        trace.append(scale.scale)
    assert trace == reference(
        overflows, window=window, hysteresis=hysteresis, consecutive=consecutive, low=4.0, high=2.0**13
    )


def test_the_scale_grows_on_the_good_step_after_window_others() -> None:
    scale = DynamicScale(8, window=5)
    trace = [scale.accept(True) and scale.scale for _ in range(12)]
    assert trace == [8, 8, 8, 8, 8, 16, 16, 16, 16, 16, 32, 32]


def test_the_scale_of_backward_is_the_one_to_divide_by_on_a_growth_step() -> None:
    scale = DynamicScale(8, window=1)
    scale.accept(True)
    used = scale.scale
    gradient = 3.0 * used  # what backward would have made of a true gradient of 3
    assert gradient / scale.scale == 3.0  # read before `accept`, as the update is
    scale.accept(True)
    assert scale.scale == 2 * used


def test_the_scale_stays_within_its_bounds() -> None:
    scale = DynamicScale(2, window=1, hysteresis=1, min_scale=1, max_scale=4, give_up_after=100)
    assert [scale.accept(True) and scale.scale for _ in range(4)] == [2, 4, 4, 4]
    assert [scale.accept(False) or scale.scale for _ in range(4)] == [2, 1, 1, 1]


def test_giving_up_counts_overflows_in_a_row_at_the_minimum_and_names_the_parameter() -> None:
    scale = DynamicScale(1, hysteresis=1, give_up_after=3, suspect=lambda: "layer.weight")
    scale.accept(False)
    scale.accept(False)
    scale.accept(True)  # starts the count anew
    scale.accept(False)
    scale.accept(False)
    with pytest.raises(
        NonFiniteError, match=r"3 steps in a row .* minimum, 1; .*'layer\.weight'.* lower the learning rate"
    ):
        scale.accept(False)


def test_hysteresis_comes_before_giving_up_at_the_minimum() -> None:
    scale = DynamicScale(2, hysteresis=3, min_scale=1, give_up_after=1)
    assert [scale.accept(False) or scale.scale for _ in range(3)] == [2, 2, 1]  # three overflows: tolerate two, halve
    with pytest.raises(NonFiniteError, match="minimum, 1"):
        scale.accept(False)
    at_the_floor = DynamicScale(1, hysteresis=2, min_scale=1, give_up_after=1)
    at_the_floor.accept(False)  # one is tolerated there as well
    with pytest.raises(NonFiniteError, match="minimum, 1"):
        at_the_floor.accept(False)


def test_a_resumed_scale_goes_on_as_if_never_stopped() -> None:
    one = DynamicScale(1024, window=4)
    for overflow in OVERFLOWS[:9]:
        one.accept(not overflow)
    other = DynamicScale(2, window=4)
    other.load_state_dict(one.state_dict())
    trace = []
    for overflow in OVERFLOWS[9:]:
        other.accept(not overflow)
        trace.append(other.scale)
    assert trace == NORMAL[9:]
    assert other.non_finite == sum(OVERFLOWS)


def test_a_static_scale_skips_overflows_and_stays() -> None:
    scale = StaticScale(128.0, give_up_after=3, suspect=lambda: "a")
    assert [scale.accept(ok) for ok in (True, False, False, True, False)] == [True, False, False, True, False]
    assert scale.scale == 128.0 and scale.non_finite == 3
    scale.accept(False)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row at the fixed loss scale 128.*'a'.*loss_scale lower"):
        scale.accept(False)


def test_policies_without_a_scale() -> None:
    skip, ignore, stop = NoScale("skip"), NoScale("ignore"), NoScale("raise", suspect=lambda: "b")
    assert [skip.accept(ok) for ok in (True, False, False)] == [True, False, False]
    assert [ignore.accept(ok) for ok in (True, False)] == [True, True]
    assert (skip.non_finite, ignore.non_finite) == (2, 1)
    assert stop.accept(True) and stop.scale == 1.0
    with pytest.raises(NonFiniteError, match=r"step 2; .*'b'.*non_finite"):
        stop.accept(False)


@pytest.mark.parametrize("make", [NoScale, lambda: StaticScale(4.0), DynamicScale])
def test_state_round_trips_and_refuses_another_kind(make: object) -> None:
    one, other = make(), make()  # type: ignore[operator]
    one.accept(False)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    with pytest.raises(CheckpointError, match="loss-scale state of kind 'strange'"):
        other.load_state_dict({**one.state_dict(), "kind": "strange"})
