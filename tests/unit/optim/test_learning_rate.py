"""The learning-rate driver: the rate is in place before the update that uses it, for every kind of schedule."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from trilithon.config.schedule import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    LrRangeTest,
    OneCycle,
    Piecewise,
    Polynomial,
    WarmupCosineLr,
    WarmupDecayLr,
    WarmupLr,
)
from trilithon.errors import CheckpointError, ConfigError, ProtocolError
from trilithon.optim.groups import groups_of
from trilithon.optim.learning_rate import Factor, LearningRate


def rates(schedule: Any, updates: int, base: float = 0.1) -> list[float]:
    """What `get_lr` says before each of the first updates of one group with rate `base`."""
    driver = LearningRate([{"lr": base}], schedule)
    result = []
    for _ in range(updates):
        result.append(driver.get_lr()[0])
        driver.advance()
    return result


def test_a_warmup_from_zero_leaves_the_first_step_at_zero_and_get_lr_is_what_is_applied() -> None:
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=123.0)
    driver = LearningRate(
        optimizer.param_groups, WarmupLr(warmup_max_lr=0.1, warmup_num_steps=10, warmup_type="linear")
    )
    for step in range(15):
        said = driver.get_lr()[0]
        before = p.item()
        p.grad = torch.ones(1)
        optimizer.step()
        assert before - p.item() == pytest.approx(said, abs=1e-7)
        if step == 0:
            assert said == 0.0 and p.item() == 0.0
        driver.advance()
    assert said == 0.1


def test_a_skipped_step_does_not_move_the_rate() -> None:
    driver = LearningRate([{"lr": 1.0}], float)
    assert driver.get_lr() == [0.0]
    assert driver.get_lr() == [0.0]  # asked again after a skip: no advance
    driver.advance()
    assert driver.get_lr() == [1.0] and driver.updates == 1


@pytest.mark.parametrize(
    "schedule,expected",
    [
        (Constant(), [0.1] * 4),
        (Constant(warmup_steps=2), [0.0, 0.05, 0.1, 0.1]),
        (Linear(total_steps=4), [0.1, 0.075, 0.05, 0.025, 0.0, 0.0]),
        (Linear(total_steps=4, warmup_steps=2, min_ratio=0.2), [0.0, 0.05, 0.1, 0.06, 0.02, 0.02]),
        (Linear(total_steps=2, warmup_steps=2), [0.0, 0.05, 0.0]),
        (Cosine(total_steps=2), [0.1, 0.05, 0.0]),
        (Polynomial(total_steps=4, power=2.0), [0.1, 0.05625, 0.025, 0.00625, 0.0]),
        (Exponential(gamma=0.5, warmup_steps=1, min_ratio=0.2), [0.0, 0.1, 0.05, 0.025, 0.02]),
        (Piecewise(boundaries=(1, 3), factors=(1.0, 0.5, 0.1)), [0.1, 0.05, 0.05, 0.01]),
        (Factor(lambda step: 0.5**step), [0.1, 0.05, 0.025]),
        (lambda step: 3.0 + step, [3.0, 4.0, 5.0]),
        (None, [0.1, 0.1]),
    ],
)
def test_rates_of_schedules(schedule: Any, expected: list[float]) -> None:
    assert rates(schedule, len(expected)) == pytest.approx(expected, abs=1e-12)


# What published DeepSpeed gives at its counter i = -1, 0, 1, ...: worked out from the formulas by hand.
LOG4 = math.log(4)


@pytest.mark.parametrize(
    "schedule,expected",
    [
        (
            WarmupLr(warmup_min_lr=0.01, warmup_max_lr=0.05, warmup_num_steps=4),
            [0.01, 0.01, 0.01 + 0.04 * math.log(2) / LOG4, 0.01 + 0.04 * math.log(3) / LOG4, 0.05, 0.05, 0.05],
        ),
        (WarmupLr(warmup_num_steps=4, warmup_type="linear"), [0.0, 0.0, 0.025, 0.05, 0.075, 0.1, 0.1]),
        (WarmupLr(warmup_num_steps=1, warmup_type="linear"), [0.0, 0.0, 0.05, 0.1]),
        (
            WarmupDecayLr(total_num_steps=4, warmup_max_lr=0.2, warmup_num_steps=2, warmup_type="linear"),
            [0.0, 0.0, 0.1, 0.2, 0.1, 0.0, 0.0],
        ),
        (
            WarmupCosineLr(
                total_num_steps=4, warmup_num_steps=2, warmup_min_ratio=0.5, cos_min_ratio=0.1, warmup_type="linear"
            ),
            [0.0, 0.05, 0.075, 0.1 * (0.1 + 0.9 * 0.5), 0.01, 0.01],
        ),
        (
            LrRangeTest(lr_range_test_min_lr=0.001, lr_range_test_step_size=2, lr_range_test_step_rate=3.0),
            [0.001, 0.0025, 0.004, 0.0055],
        ),
        (
            LrRangeTest(
                lr_range_test_min_lr=0.001,
                lr_range_test_step_size=2,
                lr_range_test_step_rate=3.0,
                lr_range_test_staircase=True,
            ),
            [0.001, 0.001, 0.004, 0.004, 0.007],
        ),
        (
            OneCycle(
                cycle_min_lr=0.1,
                cycle_max_lr=0.5,
                cycle_first_step_size=2,
                cycle_second_step_size=4,
                decay_lr_rate=1.0,
                decay_step_size=2,
                cycle_momentum=False,
            ),
            [0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 1.5, 0.1 / 2, 0.1 / 2.5],
        ),
        (
            OneCycle(
                cycle_min_lr=0.0,
                cycle_max_lr=1.0,
                cycle_first_step_size=4,
                cycle_first_stair_count=2,
                cycle_momentum=False,
            ),
            [0.0, 0.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
        ),
    ],
)
def test_rates_that_deepspeed_files_name(schedule: Any, expected: list[float]) -> None:
    assert rates(schedule, len(expected)) == pytest.approx(expected, abs=1e-12)


def test_one_cycle_moves_the_first_beta_against_the_rate() -> None:
    group = {"lr": 0.1, "betas": (0.5, 0.6)}
    schedule = OneCycle(
        cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=0.5
    )
    driver = LearningRate([group], schedule)
    betas = []
    for _ in range(6):
        betas.append(group["betas"])
        driver.advance()
    assert [b[0] for b in betas] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.5])  # type: ignore[index]
    assert {b[1] for b in betas} == {0.99}  # type: ignore[index]


def test_one_cycle_without_betas_leaves_momentum_alone_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    group = {"lr": 0.1}
    LearningRate([group], OneCycle(cycle_min_lr=0.3, cycle_max_lr=0.5))
    assert group == {"lr": 0.3}
    assert "has no betas" in caplog.text


def test_rates_per_group() -> None:
    groups = [{"lr": 1.0}, {"lr": 2.0}, {"lr": 0.0}]
    LearningRate(groups, WarmupLr(warmup_min_lr=(0.1, 0.2, 0.3), warmup_max_lr=1.0))
    assert [group["lr"] for group in groups] == [0.1, 0.2, 0.3]
    groups = [{"lr": 1.0}, {"lr": 2.0}, {"lr": 0.0}]
    driver = LearningRate(groups, Linear(total_steps=2))
    driver.advance()
    assert driver.get_lr() == [0.5, 1.0, 0.0]
    with pytest.raises(ConfigError, match="warmup_min_lr has 2 entries for 3 parameter groups"):
        LearningRate(groups, WarmupLr(warmup_min_lr=(0.1, 0.2)))


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (step + 1)),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=12),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[3]
        ),
    ],
)
def test_a_torch_scheduler_gives_the_rates_it_gives_without_us(make: Any) -> None:
    def fresh() -> torch.optim.Optimizer:
        return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    reference = fresh()
    scheduler = make(reference)
    expected = []
    for _ in range(10):
        expected.append(reference.param_groups[0]["lr"])
        reference.step()
        scheduler.step()
    mine = fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when a scheduler moves before its optimizer
        driver = LearningRate(mine.param_groups, make(mine))
        got = []
        for _ in range(10):
            got.append(driver.get_lr()[0])
            driver.advance()
    assert got == expected


def test_tensor_rates_are_filled_in_place() -> None:
    rate = torch.tensor(0.5)
    driver = LearningRate([{"lr": rate}], Linear(total_steps=2))
    driver.advance()
    assert float(rate) == 0.25 and driver.get_lr() == [0.25]


@pytest.mark.parametrize("schedule", [Cosine(total_steps=10, warmup_steps=3), None, "torch"])
def test_resuming_gives_the_same_rates(schedule: Any) -> None:
    def make() -> LearningRate:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        chosen = lr_scheduler.ExponentialLR(optimizer, 0.9) if schedule == "torch" else schedule
        return LearningRate(optimizer.param_groups, chosen)

    one, other = make(), make()
    for _ in range(4):
        one.advance()
    if schedule is None:
        one.groups[0]["lr"] = 0.07  # somebody's own edit is restored as well
    other.load_state_dict(one.state_dict())
    for _ in range(4):
        assert other.get_lr() == one.get_lr()
        one.advance()
        other.advance()


def test_what_does_not_fit_is_refused() -> None:
    one = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match="drives another optimizer"):
        LearningRate(one.param_groups, lr_scheduler.ExponentialLR(other, 0.9))
    with pytest.raises(ConfigError, match="needs a metric"):
        LearningRate(one.param_groups, lr_scheduler.ReduceLROnPlateau(one))
    with pytest.raises(ConfigError, match="lr_schedule is a str"):
        LearningRate(one.param_groups, "cosine")  # type: ignore[arg-type]
    state = LearningRate(one.param_groups, lr_scheduler.ExponentialLR(one, 0.9)).state_dict()
    with pytest.raises(CheckpointError, match="written with a torch scheduler"):
        LearningRate(one.param_groups).load_state_dict(state)
    with pytest.raises(CheckpointError, match="2 parameter groups and this run has 1"):
        LearningRate(one.param_groups).load_state_dict({"updates": 0, "scheduler": None, "lr": [0.1, 0.2]})


def test_groups_with_names_are_recognised_as_the_schedulers_own() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    driver = LearningRate(groups_of(model, optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5))
    driver.advance()
    assert driver.get_lr() == [0.05] and optimizer.param_groups[0]["lr"] == 0.05


def test_a_program_moves_the_rates_of_its_own_optimizer_also_after_that_loaded_a_state() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    rate = LearningRate(optimizer, lambda step: 1.0 / (1 + step))
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.load_state_dict(optimizer.state_dict())  # torch puts new groups in the place of the old ones
    rate.move_to(3)
    assert (rate.updates, rate.get_lr(), optimizer.param_groups[0]["lr"]) == (3, [0.25], 0.25)
    rate.move_to(1)
    rate.advance()
    assert optimizer.param_groups[0]["lr"] == 1.0 / 3


def test_a_torch_scheduler_cannot_be_moved_to_a_step() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    rate = LearningRate(optimizer, lr_scheduler.StepLR(optimizer, 2))
    with pytest.raises(ProtocolError, match="a StepLR cannot be moved to update 3"):
        rate.move_to(3)
