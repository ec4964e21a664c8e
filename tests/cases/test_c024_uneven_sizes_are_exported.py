"""C024: parameters whose sizes do not divide by the number of ranks are exported unshifted, without process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import trilithon
from trilithon.checkpoint import export
from trilithon.testing import run_ranks

SIZES = (1, 2, 3, 5, 7, 57, 1001)


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        for size in SIZES:
            self.register_parameter(f"p{size}", nn.Parameter(torch.randn(size)))

    def forward(self, x):
        return x.mean() * sum((param**2).sum() for param in self.parameters())


def train_and_save(folder, stage):
    config = {"zero": {"stage": stage}, "optimizer": {"kind": "adamw", "lr": 0.01}, "batch": {"micro_size": 2}}
    with trilithon.initialize(Uneven(), config) as engine:
        engine.train_step([torch.ones(2) + engine.rank])
        engine.save(folder)
        names = engine._sharding.trainable_names
        return {name: tensor.clone() for name, tensor in engine._sharding.full("master", names)}


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_shifted(tmp_path, stage, world_size):
    live = run_ranks(train_and_save, world_size, str(tmp_path / "run"), stage)[0]
    assert not dist.is_initialized()
    export(tmp_path / "run", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in weights.items()} == {f"p{size}": (size,) for size in SIZES}
    for name, value in live.items():
        assert torch.equal(weights[name], value), name
