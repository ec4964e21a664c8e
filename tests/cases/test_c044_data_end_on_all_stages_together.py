"""Case 44: more steps than data on three stages: it ends on all of them at the same step, or repeats if asked to."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import trilithon
from trilithon import PipelineModule
from trilithon.errors import ProtocolError
from trilithon.testing import ranks

X = torch.linspace(-1, 1, 12).view(2, 6)


def engine_of():
    torch.manual_seed(0)
    model = PipelineModule([nn.Linear(6, 6) for _ in range(3)], loss_fn=nn.functional.mse_loss)
    config = {"mesh": {"pipe": 3}, "batch": {"micro_size": 2, "accumulation": 2}, "optimizer": "adamw"}
    return trilithon.initialize(model, config)


def five():
    return [(X * (i + 1), X) for i in range(5)]


class Repeating:
    def __iter__(self):
        return iter(five())


def endless():
    while True:
        yield from five()


LOADERS = {"list": five, "generator": lambda: iter(five()), "wrapper": Repeating}


@ranks(3)
@pytest.mark.parametrize("kind", LOADERS)
def test_it_ends_after_the_last_whole_step_on_all_stages(world_size, kind):
    with engine_of() as engine:
        loader = LOADERS[kind]() if engine.rank != 1 else None  # the stage in the middle needs none
        begun = time.monotonic()
        for batches in engine.batches(loader):
            engine.train_step(batches)
        assert engine.steps == 2 and time.monotonic() - begun < 5.0
        assert list(engine.batches(five()[: 4 - 3 * (engine.rank == 2)])) == []  # one rank has less


@ranks(3)
def test_seven_steps_from_five_batches_when_they_are_to_repeat(world_size):
    losses = {}
    for kind, loader in (("list", five()), ("wrapper", Repeating()), ("endless", endless())):
        with engine_of() as engine:
            steps = engine.batches(loader, repeat=kind != "endless")
            losses[kind] = [engine.train_step(next(steps)) for _ in range(7)]
    assert losses["list"] == losses["wrapper"] == losses["endless"]


@ranks(3)
def test_what_cannot_begin_anew_is_told_on_all_stages_at_the_same_step(world_size):
    with engine_of() as engine:
        with pytest.raises(
            ProtocolError, match="after step 2, on no rank: rank 0: a list_iterator cannot be begun anew"
        ):
            for batches in engine.batches(iter(five()), repeat=True):
                engine.train_step(batches)
        assert engine.steps == 2
        with pytest.raises(ProtocolError, match="rank 2: it is empty"):
            next(engine.batches([] if engine.rank == 2 else five(), repeat=True))
        with pytest.raises(ProtocolError, match="rank 2: it got 1 micro-batches, and this step has 2"):
            engine.train_step(five()[: 1 if engine.rank == 2 else 2])
