"""C022: an export of a model with tied weights loads strictly into the plain model, and tying again works."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trilithon
from trilithon.checkpoint import export
from trilithon.testing import run_ranks

VOCABULARY = 11


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.head(self.middle(self.embed(tokens)).tanh()).float(), tokens)


def train_and_save(folder, stage, precision):
    config = {
        "zero": {"stage": stage},
        "optimizer": {"kind": "adamw", "lr": 0.01},
        "precision": precision,
        "batch": {"micro_size": 4},
    }
    with trilithon.initialize(Tied(), config) as engine:
        for step in range(2):
            engine.train_step([torch.arange(4) + step + engine.rank])
        engine.save(folder)
        names = engine._sharding.trainable_names
        return {name: tensor.clone() for name, tensor in engine._sharding.full("master", names)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_both_names_hold_the_trained_values(tmp_path, stage, precision):
    live = run_ranks(train_and_save, 2, str(tmp_path / "run"), stage, precision)[0]
    export(tmp_path / "run", tmp_path / "out")  # in this process, which has no group
    weights = load_file(tmp_path / "out" / "model.safetensors")
    model = Tied()
    model.load_state_dict(weights, strict=True)
    assert torch.equal(weights["head.weight"], weights["embed.weight"])
    for name, value in live.items():
        assert torch.equal(model.get_parameter(name), value), name
    model.head.weight = model.embed.weight
    assert torch.equal(model.head.weight, live["embed.weight"])
