"""What stages send, to the byte, and how many micro-batches they keep alive."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import trilithon
from trilithon import PipelineModule
from trilithon.parallel.pipeline import make_orders, simulate
from trilithon.testing import ranks

ROWS, WIDTH, MICROS = 3, 5, 6


class Token:
    pass


class Kept(torch.autograd.Function):
    """Does nothing, and keeps a token for as long as its backward can come."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.token = Token()
        layer.alive.add(ctx.token)
        layer.most = max(layer.most, len(layer.alive))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Counted(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.alive, self.most = weakref.WeakSet(), 0

    def forward(self, x):
        return Kept.apply(super().forward(x), self)


def engine_of(stages: int, schedule: str) -> trilithon.Engine:
    torch.manual_seed(0)
    model = PipelineModule([Counted() for _ in range(stages)], loss_fn=nn.functional.mse_loss)
    batch = {"micro_size": ROWS, "accumulation": MICROS}
    config = {"mesh": {"pipe": stages}, "batch": batch, "optimizer": "sgd", "pipeline": {"schedule": schedule}}
    return trilithon.initialize(model, config)


@ranks(2, 4)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_send_and_keep_what_the_formulas_say(world_size, schedule):
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    with engine_of(world_size, schedule) as engine:
        engine.train_step([(x, x)] * MICROS)  # shapes are told once
        with engine.ledger.measure() as sent:
            engine.train_step([(x, x)] * MICROS)
        inner = (engine.rank > 0) + (engine.rank < world_size - 1)  # gradients back, activations on
        assert sent.message_bytes == inner * MICROS * ROWS * WIDTH * 4
        with engine.ledger.measure() as sent:
            engine.eval_step([(x, x)] * 2)
            engine.eval_step([(x, x)] * 2)
        messages = sent.message_bytes - (engine.rank < world_size - 1) * 4 * ROWS * WIDTH * 4
        assert 0 <= messages < 2000 * 2  # the first evaluation tells shapes
        (layer,) = [module for module in engine.module.modules() if isinstance(module, Counted)]
        bound = simulate(make_orders(schedule, world_size, MICROS)).live[engine.rank]
        assert layer.most == bound == (min(world_size - engine.rank, MICROS) if schedule == "1f1b" else MICROS)
