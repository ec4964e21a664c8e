"""Stages beside the other features: update rules, number formats, state off the device, optimizers of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_runs import batches_of, make, parts_of, settings

import trilithon
from trilithon.testing import run_ranks

MICROS, ROWS = 4, 4


def run(mesh: dict[str, int], optimizer: Any = None, **more: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = {**settings(MICROS, ROWS, mesh=mesh, clip_norm=0.5), **more}
    if optimizer is not None:
        config.pop("optimizer")
    with trilithon.initialize(make(), config, optimizer) as engine:
        torch.manual_seed(5)
        losses = [engine.train_step(parts_of(engine, batches)) for batches in batches_of(3, MICROS, ROWS)]
        return losses, dict(engine.full_parameters())


CASES = {
    "lamb": {"optimizer": {"kind": "lamb", "lr": 1e-2, "weight_decay": 0.1}, "zero": {"stage": 1}},
    "host": {"offload": {"state": "host"}, "zero": {"stage": 2}},
}


@pytest.mark.parametrize("case", CASES)
def test_stages_train_alike_with(case):
    losses, weights = run({}, **CASES[case])
    for found, theirs in run_ranks(run, 2, {"pipe": 2}, **CASES[case]):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        for name, value in theirs.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-5, msg=name)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def test_an_optimizer_of_ones_own_over_the_parameters_of_a_stage():
    losses, _ = run({}, adamw)
    for found, _ in run_ranks(run, 2, {"pipe": 2}, adamw, zero={"stage": 1}):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=1e-6)


def test_bf16_stages_give_the_losses_of_one_process():
    losses, _ = run({}, precision="bf16")
    for found, _ in run_ranks(run, 2, {"pipe": 2}, precision="bf16", zero={"stage": 2}):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=2e-2, atol=1e-2)
