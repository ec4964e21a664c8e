"""Weights are loaded without optimizer state: a step at rate 0 leaves them as loaded, rounded to the model's type."""

import pytest
import torch

import trilithon
from saved_runs import ADAM, OddNet, batches, settings, train
from trilithon.testing import ranks

STILL = {**ADAM, "lr": 0.0, "weight_decay": 0.0}


@ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_at_rate_zero_keeps_the_loaded_weights(precision, tmp_path):
    for stage in (1, 2, 3):
        with trilithon.initialize(OddNet(), settings(stage, precision)) as engine:
            train(engine, batches(3))
            engine.save(tmp_path / str(stage))
            weights = dict(engine.view("param"))
        given = settings(stage, precision, optimizer=STILL, lr_schedule=None)
        with trilithon.initialize(OddNet(seed=7), given) as engine:
            engine.load(tmp_path / str(stage), parts=("weights",))
            while not engine.steps:  # fp16 overflows at first
                train(engine, batches(1))
            assert all(torch.equal(value, weights[name]) for name, value in engine.view("param"))
