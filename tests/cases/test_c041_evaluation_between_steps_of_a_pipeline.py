"""Case 41: evaluate, train, evaluate, evaluate, train on two stages: everything runs, and training does not notice."""

from __future__ import annotations

import torch
from torch import nn

import trilithon
from trilithon import LayerSpec, PipelineModule
from trilithon.testing import ranks

MICROS, ROWS, WIDTH = 4, 2, 6
CONFIG = {"mesh": {"pipe": 2}, "batch": {"micro_size": ROWS, "accumulation": MICROS}, "optimizer": "adamw"}


def model():
    torch.manual_seed(0)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), nn.Dropout(0.5), torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH)]
    return PipelineModule(layers, loss_fn=nn.functional.mse_loss)


def batches(step, micros=MICROS, rows=ROWS):
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(rows, WIDTH, generator=generator), torch.zeros(rows, WIDTH)) for _ in range(micros)]


@ranks(2)
def test_evaluations_leave_training_as_it_was(world_size):
    with trilithon.initialize(model(), CONFIG) as engine:
        torch.manual_seed(1)
        expected = [engine.train_step(batches(step)) for step in range(2)]
    with trilithon.initialize(model(), CONFIG) as engine:
        torch.manual_seed(1)
        first = engine.eval_step(batches(7))
        losses = [engine.train_step(batches(0))]
        state, grads = torch.get_rng_state(), [param.grad for param in engine.module.parameters()]
        second = engine.eval_step(batches(7, micros=3, rows=5))  # another number, another shape
        third = engine.eval_step(batches(7))
        again, outputs = engine.eval_step(batches(7), outputs=True)
        assert torch.equal(torch.get_rng_state(), state)
        assert [param.grad for param in engine.module.parameters()] == grads
        assert engine.module.training
        losses.append(engine.train_step(batches(1)))
        assert losses == expected
        assert first != third == again and second > 0
        assert (outputs is None) == (engine.rank == 0)
        assert outputs is None or [tuple(output.shape) for output in outputs] == [(ROWS, WIDTH)] * MICROS
        told = engine._sharding.exchange((first, second, third, *losses), "the same on both")
        assert told[0] == told[1]
