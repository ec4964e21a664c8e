"""A warm-up from zero starts at zero: the first step does not use the optimizer's own rate.

Schedulers that set a rate only after a step left the first update at the full rate. The rate that the engine reports
before a step has to be the one that this step applies, from the first on, whoever gives the schedule.
https://github.com/deepspeedai/DeepSpeed/issues/6569
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trilithon import initialize

STEPS, TOP = 12, 1e-1


class Slope(nn.Module):
    """The gradient of its one weight is 1 whatever the weight is, so a step of SGD shows the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))  # fp64: differences show rates exactly enough

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def warm_up(step: int) -> float:
    return min(step / 10, 1.0)


def engine_with(way: str, stage: int) -> tuple[Any, Slope]:
    model = Slope()
    config: dict[str, Any] = {"zero": {"stage": stage}}
    if way == "configured":
        config |= {
            "optimizer": {"kind": "sgd", "lr": TOP},
            "lr_schedule": {"kind": "constant", "warmup_steps": 10},
        }
        return initialize(model, config), model
    if way == "DeepSpeed's":
        config |= {
            "optimizer": {"kind": "sgd", "lr": TOP},
            "lr_schedule": {
                "kind": "warmup_lr", "warmup_min_lr": 0.0, "warmup_max_lr": TOP, "warmup_num_steps": 10,
                "warmup_type": "linear",
            },
        }  # fmt: skip
        return initialize(model, config), model
    if way == "function":
        config["optimizer"] = {"kind": "sgd", "lr": TOP}
        return initialize(model, config, lr_schedule=lambda step: TOP * warm_up(step)), model
    sgd = torch.optim.SGD(model.parameters(), lr=TOP)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, warm_up)
    return initialize(model, config, optimizer=sgd, lr_schedule=schedule), model


@pytest.mark.parametrize("way", ["configured", "DeepSpeed's", "function", "torch"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_reported_rate_is_the_applied_one_from_the_first_step_on(way: str, stage: int):
    engine, model = engine_with(way, stage)
    for step in range(STEPS):
        behind = way == "DeepSpeed's"  # its counter starts at -1 and both -1 and 0 give the lowest rate
        expected = TOP * warm_up(max(step - behind, 0))
        assert engine.lr == [pytest.approx(expected, rel=1e-6, abs=1e-12)], step
        said, before = engine.lr[0], float(model.weight.detach())
        engine.backward(engine(torch.ones(())))
        assert engine.step()
        assert before - float(model.weight.detach()) == pytest.approx(said, rel=1e-6, abs=1e-12), step
    engine.close()
