"""A 10x8 embedding built in slices becomes 14x8: old rows stay, new rows are the same on all ranks, and it trains."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from against_plain import engine_for, train_engine
from trilithon.testing import ranks
from trilithon.zero import gathered, init


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.out(self.rows(tokens).mean(1)), target)


@ranks(2)
def test_resize_under_sharded_construction():
    torch.manual_seed(100 + dist.get_rank())  # unlike seeds: new rows must still agree
    with init():
        model = Tagger()
    with gathered(model.rows):
        old = model.rows.weight.detach().clone()
    with init():
        larger = nn.Embedding(14, 8)
    with gathered([*model.rows.parameters(), *larger.parameters()], modify=0), torch.no_grad():
        larger.weight[:10] = model.rows.weight
    model.rows = larger
    assert model.rows.weight.shape == (14, 8)
    engine = engine_for(model, 3)
    assert dict(engine.full_parameters())["rows.weight"].shape == (14, 8)
    rows = dict(engine.full_parameters())["rows.weight"]
    assert torch.equal(rows[:10], old)
    everywhere = [torch.empty_like(rows) for _ in range(2)]
    dist.all_gather(everywhere, rows)
    assert torch.equal(everywhere[0], everywhere[1])
    assert bool(rows[10:].isfinite().all()) and float(rows[10:].std()) > 0.1
    tokens = torch.arange(14).repeat(2, 1)
    train_engine(engine, [[(tokens, torch.ones(2, 4))]])
    saved = engine.state_dict()
    assert saved["rows.weight"].shape == (14, 8) and bool((saved["rows.weight"] != rows).all())
    engine.close()


@ranks(2)
def test_resize_inside_the_constructing_context():
    torch.manual_seed(100 + dist.get_rank())
    with init():
        model = Tagger()
        old = model.rows
        model.rows = nn.Embedding(14, 8)
        model.rows.weight.data[:10] = old.weight.data
    with gathered([model.rows.weight, old.weight]):
        assert model.rows.weight.shape == (14, 8)
        assert torch.equal(model.rows.weight[:10], old.weight)
