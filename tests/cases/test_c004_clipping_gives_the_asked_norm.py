"""Clipping at 0.1 moves the weights by 0.1, at every stage and precision, and the engine says so.

One code path of a system applied the clip factor wrongly, and others reported only the norm before clipping, so users
could not tell whether anything was clipped. Here a gradient of norm 10 and SGD at rate 1 have to move the fp32 masters
by exactly 0.1, and both the norm before clipping and the factor are reported.
https://github.com/deepspeedai/DeepSpeed/issues/5150
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from trilithon import initialize
from trilithon.testing import ranks


class KnownGradient(nn.Module):
    """The loss is 0.625 times the sum of 256 weights, in three parameters of two modules: a gradient of norm 10."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12, bias=True), nn.Linear(10, 10, bias=False)
        for param in self.parameters():
            nn.init.zeros_(param)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones(1, 12, dtype=x.dtype)
        # each weight of a linear layer enters its summed output once for an input of ones
        total = self.a(one).sum() + self.b(torch.ones(1, 10, dtype=x.dtype)).sum()
        return total.float() * 0.625 * x.float().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@ranks(2)
def test_the_masters_move_by_the_clip_norm(precision: str, accumulation: int, world_size: int):
    for stage in (0, 1, 2, 3):
        config = {
            "zero": {"stage": stage, "bucket_numel": 100},
            "precision": precision,
            "optimizer": {"kind": "sgd", "lr": 1.0},
            "batch": {"accumulation": accumulation},
            "clip_norm": 0.1,
        }
        engine = initialize(KnownGradient(), config)
        before = dict(engine.full_parameters())
        for _ in range(accumulation):
            engine.backward(engine(torch.ones(1)))
        assert engine.step()
        moved = math.sqrt(sum((v - before[n]).double().square().sum().item() for n, v in engine.full_parameters()))
        # the factor is 0.1 / (10 + 1e-6) in fp32 arithmetic, and 256 equal numbers are multiplied by it
        assert moved == pytest.approx(0.1, rel=1e-6), stage
        assert engine.grad_norm == pytest.approx(10.0, rel=1e-6), stage
        assert engine.clip_factor == pytest.approx(0.01, rel=1e-6), stage
        engine.close()


@ranks(2)
def test_a_norm_below_the_limit_is_not_changed(world_size: int):
    for stage in (0, 1, 2, 3):
        engine = initialize(
            KnownGradient(), {"zero": {"stage": stage}, "optimizer": {"kind": "sgd", "lr": 1.0}, "clip_norm": 20.0}
        )
        engine.backward(engine(torch.ones(1)))
        assert engine.step()
        assert engine.clip_factor == 1.0
        assert all(torch.equal(v, torch.full_like(v, -0.625)) for n, v in engine.full_parameters())
        engine.close()
