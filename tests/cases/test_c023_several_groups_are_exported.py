"""C023: with parameter groups whose members alternate in the model, every exported tensor is the live one."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import trilithon
from trilithon.checkpoint import export
from trilithon.testing import run_ranks
from trilithon.testing.models import MLP


def train_and_save(folder, stage):
    torch.manual_seed(1)
    model = MLP()
    params = list(model.parameters())
    groups = [{"params": params[0::2], "weight_decay": 0.1}, {"params": params[1::2], "weight_decay": 0.0, "lr": 0.02}]
    config = {
        "zero": {"stage": stage},
        "optimizer": {"kind": "adamw", "lr": 0.01},
        "precision": "bf16",
        "batch": {"micro_size": 4},
    }
    with trilithon.initialize(model, config, parameters=groups) as engine:
        torch.manual_seed(engine.rank)
        for _ in range(2):
            engine.train_step([(torch.randn(4, 16), torch.randn(4, 4))])
        engine.save(folder)
        names = engine._sharding.trainable_names
        return {name: tensor.clone() for name, tensor in engine._sharding.full("master", names)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_exported_tensor_is_the_live_one(tmp_path, stage):
    live = run_ranks(train_and_save, 2, str(tmp_path / "run"), stage)[0]
    export(tmp_path / "run", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert set(weights) == set(live) and len(live) >= 4
    for name, value in live.items():
        assert torch.equal(weights[name], value), name
