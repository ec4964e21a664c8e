"""Experts over the data axis and matrices over the tensor axis train as experts over the data axis alone do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trilithon.engine.build import initialize
from trilithon.errors import ConfigError
from trilithon.parallel.moe import MoE
from trilithon.testing import ranks, run_ranks

WIDTH, INNER, EXPERTS, STEPS = 8, 16, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return out


class Mixed(nn.Module):
    """A dense block, which is cut, and experts, which are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, Block(), EXPERTS, ep_size=2, k=1, drop_tokens=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(self.norm(x))
        change, balance, _ = self.moe(x)
        return (x + change).square().mean() + 0.1 * balance


def train(mesh, stage):
    config = {
        "mesh": mesh,
        "zero": {"stage": stage},
        "optimizer": {"kind": "adam", "lr": 1e-2, "eps": 1e-6},
        "clip_norm": 0.05,
        "batch": {"micro_size": 6},
    }
    with initialize(Mixed(), config) as engine:
        generator = torch.Generator().manual_seed(1)
        losses, norms = [], []
        for _ in range(STEPS):
            batch = torch.randn(12, WIDTH, generator=generator)
            losses.append(engine.train_step([batch[engine.mesh.data_rank * 6 :][:6]]))
            norms.append(engine.grad_norm)
        return losses, norms, {name: value.clone() for name, value in engine.full_parameters()}, len(engine.slices)


@pytest.mark.parametrize("stage", [0, 3])
def test_experts_and_tensor_slices_on_one_mesh(stage):
    alone = run_ranks(train, 2, {"data": 2}, stage)[0]
    for losses, norms, parameters, num_cut in run_ranks(train, 4, {"data": 2, "tensor": 2}, stage):
        assert num_cut == 3  # two matrices and the bias between them
        assert losses == pytest.approx(alone[0], rel=1e-6) and norms == pytest.approx(alone[1], rel=1e-6)
        for name, value in alone[2].items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-6)


@ranks(2)
def test_experts_under_cut_norms_are_refused(world_size):
    plan = {"dense.up": "column", "dense.down": "row", "table": "vocabulary"}
    model = Mixed()
    model.table = nn.Embedding(4, WIDTH)
    model.moe.ep_size = 1
    with pytest.raises(ConfigError, match=r"Leave tensor\.cut_norms out"):
        initialize(model, {"mesh": {"tensor": 2}, "tensor": {"plan": plan, "cut_norms": True}})
