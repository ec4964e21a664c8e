"""The five schedules as objects: what programs read from them, and that the rates are those of the formulas."""

from __future__ import annotations

import argparse
import math

import pytest
import torch
from torch import nn

from trilithon.compat.deepspeed.runtime import lr_schedules
from trilithon.compat.deepspeed.runtime.lr_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    add_tuning_arguments,
)


def optimizer(lr: float = 0.1, groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=lr)


def rates(schedule, steps: int) -> list[float]:
    """The rate of each of the first updates."""
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    return found


def test_warm_up_uses_the_least_rate_twice_and_stays_at_the_greatest():
    found = rates(WarmupLR(optimizer(), 0.01, 0.1, 4), 7)
    share = [0, 0, math.log(2) / math.log(4), math.log(3) / math.log(4), 1, 1, 1]
    assert found == pytest.approx([0.01 + 0.09 * s for s in share], rel=1e-12)


def test_the_greatest_rate_is_the_groups_own_unless_the_release_is_the_older_one(monkeypatch):
    assert rates(WarmupLR(optimizer(0.2), warmup_num_steps=2), 4)[-1] == 0.2
    monkeypatch.setenv("TRILITHON_DEEPSPEED_RELEASE", "0.16")
    assert rates(WarmupLR(optimizer(0.2), warmup_num_steps=2), 4)[-1] == 0.001


def test_no_warm_up_steps_are_an_error_that_the_older_release_does_not_make(monkeypatch):
    with pytest.raises(ValueError, match="warmup_num_steps"):
        WarmupLR(optimizer(), warmup_num_steps=0)
    monkeypatch.setenv("TRILITHON_DEEPSPEED_RELEASE", "0.16")
    assert rates(WarmupLR(optimizer(), 0, 0.1, 0), 4)[-1] == 0.1


@pytest.mark.parametrize(
    ("make", "last"),
    [
        (lambda o: WarmupDecayLR(o, 6, 0.0, 0.1, 2, "linear"), 0.1 * (6 - 5) / (6 - 2)),
        (lambda o: WarmupCosineLR(o, 6, warmup_num_steps=2, cos_min_ratio=0.5), 0.1 * 0.5),
        (lambda o: OneCycle(o, 0.1, 0.3, cycle_first_step_size=4), 0.1 + 0.2 * (8 - 6) / 4),
        (lambda o: LRRangeTest(o, 0.01, 3, 1.0), 0.01 * (1 + 6 / 3)),
    ],
)
def test_positions_of_arguments_and_the_rate_of_the_seventh_update(make, last):
    assert rates(make(optimizer()), 7)[-1] == pytest.approx(last, rel=1e-12)


def test_one_cycle_moves_the_first_beta_and_tells_its_rate_after_the_first_step_only():
    schedule = OneCycle(optimizer(), 0.1, 0.3, cycle_first_step_size=2)
    with pytest.raises(AssertionError, match="need to call step"):
        schedule.get_last_lr()
    schedule.step()
    assert schedule.get_last_lr() == schedule.get_lr() == [pytest.approx(0.2)]
    assert schedule.optimizer.param_groups[0]["betas"] == pytest.approx((0.85, 0.99))


def test_state_is_the_counter_and_step_can_be_told_it():
    schedule, again = WarmupLR(optimizer(), 0, 0.1, 5), WarmupLR(optimizer(), 0, 0.1, 5)
    assert schedule.get_last_lr() == [0.0] and schedule.state_dict() == {"last_batch_iteration": -1}
    for _ in range(3):
        schedule.step()
    again.load_state_dict(schedule.state_dict())
    assert again.get_last_lr() == schedule.get_last_lr()
    again.step(2)
    assert again.optimizer.param_groups[0]["lr"] == schedule.get_lr()[0]


def test_rates_are_one_for_each_group_or_refused():
    two = optimizer(groups=2)
    WarmupLR(two, [0.1, 0.2], [0.3, 0.4], 2)
    assert [group["lr"] for group in two.param_groups] == [0.1, 0.2]
    with pytest.raises(ValueError, match="2 entries for 1 parameter groups"):
        WarmupLR(optimizer(), [0.1, 0.2])


def test_an_unknown_kind_of_warm_up_is_logarithmic_with_a_warning(caplog):
    found = rates(WarmupLR(optimizer(), 0.0, 0.1, 4, "cubic"), 4)
    assert "cubic" in caplog.text and found == rates(WarmupLR(optimizer(), 0.0, 0.1, 4), 4)


def test_names_are_those_that_accelerate_looks_for():
    for name in lr_schedules.VALID_LR_SCHEDULES:
        kind = getattr(lr_schedules, name)
        assert kind.__name__ == name and not issubclass(kind, torch.optim.lr_scheduler.LRScheduler)


def test_a_parser_gets_a_flag_for_each_parameter():
    args = add_tuning_arguments(argparse.ArgumentParser()).parse_args(
        ["--lr_schedule", "WarmupLR", "--warmup_num_steps", "7", "--cycle_max_lr", "0.5"]
    )
    assert (args.lr_schedule, args.warmup_num_steps, args.cycle_max_lr) == ("WarmupLR", 7, 0.5)
