"""The warm-up ends when it is told to, or when the variance has settled, and never while it still grows."""

import pytest

from trilithon.optim.freeze import Freeze


def run(freeze, norms, beta2=0.99, rate=lambda step: 1.0):
    """norms: |v|_1 by step, from 1; returns the step at which the warm-up ended."""
    for step, norm in enumerate(norms, start=1):
        freeze.observe(step, beta2, rate(step), lambda norm=norm: norm)
        if freeze.over(step + 1):
            return step
    return None


def settled(steps, beta2=0.99, level=1.0):
    """|v|_1 of gradients of constant size: it grows towards its level, and is constant once corrected."""
    return [level * (1 - beta2**step) for step in range(1, steps + 1)]


def test_a_given_length_is_kept():
    freeze = Freeze(3)
    assert [freeze.over(step) for step in (1, 3, 4)] == [False, False, True]
    assert run(Freeze(7), settled(20)) == 7


def test_a_settled_variance_ends_it_after_two_periods_and_three_checks():
    assert run(Freeze("auto"), settled(400)) == 220  # period 100, a check every 10 steps: 200, 210, 220


def test_a_variance_that_grows_or_shrinks_does_not():
    growing = [norm * 1.01**step for step, norm in enumerate(settled(600))]
    shrinking = [norm * 0.99**step for step, norm in enumerate(settled(600))]
    assert run(Freeze("auto"), growing) is None  # a one-sided test of the ratio would fire here
    assert run(Freeze("auto"), shrinking) is None
    assert run(Freeze("auto"), [0.0] * 600) is None


def test_it_waits_for_the_learning_rate_to_stop_rising():
    assert run(Freeze("auto"), settled(900), rate=lambda step: min(step / 300, 1.0)) > 300 + 100
    assert run(Freeze("auto"), settled(900), rate=lambda step: 1.0 / step) == 220  # falling is fine


def test_norms_are_asked_for_only_when_they_are_looked_at():
    asked = []
    freeze = Freeze("auto")
    for step in range(1, 101):
        freeze.observe(step, 0.99, 1.0, lambda: asked.append(1) or 1.0)
    assert len(asked) == 10


@pytest.mark.parametrize("stop", [50, 205, 215])
def test_a_resumed_criterion_fires_at_the_same_step(stop):
    first, norms = Freeze("auto"), settled(400)
    assert run(first, norms[:stop]) is None
    second = Freeze("auto")
    second.load_state_dict(first.state_dict())
    for step in range(stop + 1, 401):
        second.observe(step, 0.99, 1.0, lambda step=step: norms[step - 1])
        if second.over(step + 1):
            break
    assert step == 220


def test_a_given_length_follows_the_present_settings():
    saved = Freeze(3).state_dict()
    other = Freeze(9)
    other.load_state_dict(saved)
    assert other.last == 9
