"""1-bit LAMB gives each expert of a stack the trust ratio that it has as a module of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import trilithon
from trilithon.parallel.moe import MoE
from trilithon.testing.moe_reference import PlainMoE

WIDTH, EXPERTS = 6, 3


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH))


class Model(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        y, balance, *_ = self.moe(x)
        return (x + y).square().mean() + 0.1 * balance


def test_coefficients_are_those_of_a_loop_of_modules() -> None:
    torch.manual_seed(0)
    stacked = MoE(WIDTH, block(), EXPERTS, k=1, drop_tokens=False)
    experts = []
    for index in range(EXPERTS):
        one = block()
        one.load_state_dict({name: value[index] for name, value in stacked.experts.state_dict().items()})
        experts.append(one)
    plain = PlainMoE(stacked.gate.weight, experts, 1, capacity_factor=None, min_capacity=0)
    rule = {"kind": "onebit_lamb", "lr": 1e-2, "freeze_step": 4, "weight_decay": 0.1, "per_tensor_scaling": False}
    found = []
    for model in (Model(stacked), Model(plain)):
        with trilithon.initialize(model, {"optimizer": rule}) as engine:
            generator = torch.Generator().manual_seed(1)
            history = []
            for _ in range(6):  # four of warm-up, two compressed
                engine.backward(engine(torch.randn(32, WIDTH, generator=generator)))
                engine.step()
                names = engine._update._tensors.labels
                history.append(dict(zip(names, engine._update.coefficients(), strict=True)))
            found.append(history)
    for ours, theirs in zip(*found, strict=True):
        assert len(ours) == len(theirs) == 1 + 4 * EXPERTS
        for index in range(EXPERTS):
            for own in ("0.weight", "0.bias", "2.weight", "2.bias"):
                mine, other = ours[f"moe.experts.{own}[{index}]"], theirs[f"moe.experts.{index}.{own}"]
                assert mine == pytest.approx(other, rel=1e-3), (index, own)
    spread = {round(found[0][-1][f"moe.experts.0.weight[{index}]"], 5) for index in range(EXPERTS)}
    assert len(spread) == EXPERTS  # they differ, so the comparison means something
