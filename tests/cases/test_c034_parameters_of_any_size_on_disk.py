"""C034 (deepspeedai/DeepSpeed#1033): parameters of any size rest on disk, each in a unit of its own, bit for bit."""

from pathlib import Path

import torch
from torch import Tensor, nn

import trilithon
from trilithon.testing import ranks

SHAPES = ((512, 1000), (1,), (7, 3), (1023,), (4097,))


class Weight(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).tanh().square().mean()


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Weight(shape) for shape in SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        return sum(part(x) for part in self.parts)


def trained(**offload: object) -> list[Tensor]:
    zero = {"stage": 3, "unit_classes": ["Weight"]}
    config = {"zero": zero, "optimizer": {"kind": "adamw", "lr": 1e-2}, "offload": offload}
    with trilithon.initialize(Shapes(), config) as engine:
        for step in range(3):
            engine.train_step([torch.full((1,), 0.3 + 0.1 * step)])
        return [value for _, value in sorted(engine.full_parameters())]


@ranks(1, 2)
def test_every_size_trains_bit_for_bit(world_size: int, tmp_path: Path):
    expected = trained()
    for state in ("device", "disk"):
        found = trained(parameters="disk", state=state, path=str(tmp_path))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
