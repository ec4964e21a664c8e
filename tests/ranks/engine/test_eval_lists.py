"""A list of (inputs, labels) means the same to eval_step with stages and without."""

import pytest
import torch
from torch import nn

import trilithon
from trilithon.errors import ProtocolError
from trilithon.testing import ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)


def batches(rank: int, count: int = 3):
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(2, 4, generator=generator), torch.randn(2, 1, generator=generator)) for _ in range(count)]


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_mean_over_all_ranks(world_size, stage):
    plain = Net().eval()
    expected = [torch.stack([plain(*one) for one in batches(rank)]).mean().item() for rank in range(world_size)]
    with trilithon.initialize(Net(), {"zero": {"stage": stage}, "optimizer": "sgd"}) as engine:
        mine = batches(engine.rank)
        assert engine.eval_step(mine) == pytest.approx(sum(expected) / world_size, rel=1e-6)
        assert engine.eval_step([list(one) for one in mine], own_data=True) == pytest.approx(expected[engine.rank])
        mean, outputs = engine.eval_step(mine, outputs=True)
        assert mean == pytest.approx(sum(expected) / world_size, rel=1e-6) and len(outputs) == len(mine)
        assert float(engine.eval_step(mine[0])) == pytest.approx(float(plain(*mine[0])), rel=1e-6)
        assert engine.module.training


@ranks(2)
def test_lists_that_differ_are_refused_on_all_ranks(world_size):
    with trilithon.initialize(Net(), {"zero": {"stage": 3}, "optimizer": "sgd"}) as engine:
        for counts in ([3, 2], [0, 1], [0, 0]):
            with pytest.raises(ProtocolError, match=rf"lists of \[{counts[0]}, {counts[1]}\] micro-batches"):
                engine.eval_step(batches(engine.rank, counts[engine.rank]))
        assert engine.eval_step(batches(engine.rank)) > 0
