"""A layer that gets no gradient, on all ranks or on some, never leaves a rank waiting for another.

A system hung at the first step at stage 2 when a parameter received no gradient. Here missing gradients count as zero
in the mean; a parameter that no rank used stays as it is and is named in one warning. A branch that only some ranks
take may not be a gather unit of its own at stage 3: naming the class around it in `zero.unit_classes` gathers it with
its surroundings on all ranks, and otherwise the run ends at once with a table of who gathers what.
https://github.com/huggingface/accelerate/issues/2194
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from trilithon import initialize
from trilithon.testing import ranks, run_ranks_raw
from trilithon.testing.models import MLP
from trilithon.testing.parity import rank_part, vector_batches

STEPS = 4


class Branching(nn.Module):
    """[B, 16] -> [B, 4]. `extra` is added when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.extra = nn.Linear(16, 4)

    def forward(self, x: Tensor, use_extra: bool) -> Tensor:
        output: Tensor = self.body(x)
        return output + self.extra(x) if use_extra else output


class Net(nn.Module):
    """[B, 16] -> a loss []."""

    def __init__(self) -> None:
        super().__init__()
        self.branching = Branching()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, target: Tensor, use_extra: bool) -> Tensor:
        return nn.functional.mse_loss(self.last(self.branching(x, use_extra)), target)


class Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.parametrize("users", [(), (0,)], ids=["nobody uses it", "rank 0 only"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(2)
def test_training_finishes_and_follows_plain_pytorch(stage: int, users: tuple[int, ...], world_size: int):
    warnings = Collected()
    logging.getLogger("trilithon").addHandler(warnings)
    batches = [micro[0] for micro in vector_batches(STEPS, rows=2 * world_size)]
    zero = {"stage": stage, "bucket_numel": 100, "unit_classes": ("Branching",)}
    config = {"zero": zero, "optimizer": {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.1}}
    engine = initialize(Net(), config)
    assert len(engine.plan().splitlines()) > 2
    for batch in batches:
        engine.backward(engine(*rank_part(batch, engine.rank, world_size), engine.rank in users))
        assert engine.step()
    got, rank = dict(engine.full_parameters()), engine.rank
    engine.close()

    plain = Net()
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for batch in batches:
        adamw.zero_grad()
        losses = [plain(*rank_part(batch, r, world_size), r in users) for r in range(world_size)]
        (sum(losses) / world_size).backward()
        adamw.step()
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(got[name], expected.detach(), rtol=1e-5, atol=1e-6, msg=f"{name} at stage {stage}")
    named = [message for message in warnings.messages if "extra.weight" in message and "extra.bias" in message]
    assert len(named) == (1 if rank == 0 and not users else 0), warnings.messages


def diverge() -> None:
    zero = {"stage": 3, "bucket_numel": 1, "unit_classes": ("Linear",)}
    engine = initialize(Net(), {"zero": zero, "optimizer": {"kind": "sgd"}, "comm": {"wait_limit_s": 10}})
    batch = vector_batches(1, rows=2)[0][0]
    for _ in range(STEPS):
        engine.backward(engine(*batch, engine.rank == 0))
        engine.step()


def test_a_gather_that_one_rank_does_not_make_ends_the_run_by_name():
    results = run_ranks_raw(diverge, 2, timeout_s=40)
    assert all(result.exit_code not in (None, 0, -9) for result in results), results
    said = results[0].output + results[1].output
    assert "branching.extra" in said and "branching.extra.weight" in said
    assert "a branch that depends on the rank" in said
