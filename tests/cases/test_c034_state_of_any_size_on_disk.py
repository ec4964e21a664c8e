"""C034: state of any size rests on disk; training is that without offloading, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import trilithon
from trilithon.testing import ranks

SHAPES = ((512, 1000), (1,), (7, 3), (1023,), (4097,))


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        return sum((weight * x).tanh().square().mean() for weight in self.weights)


def trained(**offload: object) -> list[Tensor]:
    config = {"zero": {"stage": 3}, "optimizer": {"kind": "adamw", "lr": 1e-2}, "offload": offload}
    with trilithon.initialize(Shapes(), config) as engine:
        for step in range(3):
            engine.train_step([torch.full((1,), 0.3 + 0.1 * step)])
        return [tensor for kind in ("master", "exp_avg", "exp_avg_sq") for _, tensor in engine.view(kind)]


@ranks(1, 2)
def test_every_size_trains_bit_for_bit(tmp_path):
    expected = trained()
    for sub_group in (1 << 22, 10_007):
        found = trained(state="disk", path=str(tmp_path), sub_group_numel=sub_group)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
