"""bf16 weights with gradients summed in fp32: no micro-batch escapes the average over ranks.

A system reduced the accumulated gradients first and added those of the last micro-batch afterwards, each rank its own,
so how a batch was cut into micro-batches changed training. What the update reads has to be the mean over every
micro-batch of every rank, the same bits on all of them, and the same (up to bf16) for every cut of a batch.
https://github.com/deepspeedai/DeepSpeed/issues/7985
"""

from __future__ import annotations

import pytest
from torch import Tensor

from trilithon import initialize
from trilithon.testing import ranks
from trilithon.testing.engine_run import digest_of
from trilithon.testing.models import MLP
from trilithon.testing.parity import rank_part, vector_batches

ROWS = 8  # per rank and step
BF16 = 2.0**-8  # rounding of one number, relative


def gradients(stage: int, accumulation: int, world_size: int) -> dict[str, Tensor]:
    """As the update will read them: mean over ranks and micro-batches, by name."""
    data = vector_batches(1, rows=ROWS * world_size)[0][0]
    zero = {"stage": stage, "accumulate_dtype": "fp32"}
    config = {"zero": zero, "precision": "bf16", "optimizer": {"kind": "sgd"}, "batch": {"accumulation": accumulation}}
    engine = initialize(MLP(), config)
    x, target = rank_part(data, engine.rank, world_size)
    for part, its_target in zip(x.chunk(accumulation), target.chunk(accumulation), strict=True):
        engine.backward(engine(part, its_target))
    found = {name: grad.clone() for name, grad in engine.view("grad")}
    reports = engine._sharding.exchange(digest_of(found.values()), "digest of gradients")
    assert len(set(reports)) == 1, "ranks would update by different gradients"
    engine.step()
    engine.close()
    return found


def mean_of_all(accumulation: int, world_size: int) -> dict[str, Tensor]:
    """Plainly: one bf16 model, a backward for each micro-batch of each rank, averaged in fp64."""
    data = vector_batches(1, rows=ROWS * world_size)[0][0]
    model, total = MLP().bfloat16(), {}
    for rank in range(world_size):
        x, target = rank_part(data, rank, world_size)
        for part, its_target in zip(x.chunk(accumulation), target.chunk(accumulation), strict=True):
            model.zero_grad()
            model(part.bfloat16(), its_target.bfloat16()).backward()
            for name, param in model.named_parameters():
                share = param.grad.double() / (accumulation * world_size)
                total[name] = total.get(name, 0.0) + share
    return total


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest distance of a parameter's gradients, relative to their size."""
    return max(((a[n].double() - b[n].double()).norm() / b[n].double().norm()).item() for n in b)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(2)
def test_the_update_follows_the_mean_of_every_micro_batch(stage: int, world_size: int):
    found = {cut: gradients(stage, cut, world_size) for cut in (4, 2, 1)}
    for cut, grads in found.items():
        # each contribution is rounded to bf16 once more where it is scaled or sent
        assert apart(grads, mean_of_all(cut, world_size)) < 2 * BF16, cut
    # a cut changes how far sums inside one backward are carried before rounding: a few roundings, not a share of 1/8
    assert apart(found[4], found[1]) < 4 * BF16
    assert apart(found[2], found[1]) < 4 * BF16
