"""Rank 0 calls forward 3 times and rank 1 7 times, then both train: uneven() finishes and changes nothing."""

import torch
import torch.distributed as dist

from against_plain import engine_for, train_engine, train_plainly
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import assert_same_training, tolerance, vector_batches


@ranks(2)
def test_uneven_forwards_then_a_training_step():
    batches = vector_batches(1, 4)
    reference = train_plainly(MLP, batches, 2)
    plain, engine = MLP(), engine_for(MLP(), 3)
    x = torch.ones(1, 16)
    engine.eval()
    with engine.uneven(), torch.no_grad():
        for _ in range([3, 7][dist.get_rank()]):
            assert torch.equal(engine(x), plain(x))
    engine.train()
    losses, norms = train_engine(engine, batches)
    got = dict(engine.full_parameters())
    engine.close()
    assert_same_training(reference, losses, got, tolerance("fp32", 1, optimizer="sgd"), norms)
