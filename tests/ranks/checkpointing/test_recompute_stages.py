"""Recomputed blocks under sharding: the same bits at every stage, in fp32 and bf16, with tiles and accumulation."""

from __future__ import annotations

import torch

import trilithon
from trilithon.testing import ranks
from trilithon.testing.engine_run import train_on_engine
from trilithon.testing.models import TinyGPT
from trilithon.testing.parity import token_batches

ADAMW = {"kind": "adamw", "lr": 1e-2}


def model() -> TinyGPT:
    return TinyGPT(layers=3)


@ranks(2)
def test_training_is_bit_for_bit_the_same_with_and_without(world_size: int):
    batches = token_batches(2, 2 * world_size, 2)
    for stage, precision in ((0, "fp32"), (3, "fp32"), (3, "bf16")):
        digests = []
        for recompute in (None, {}, {"tier": "host"}, {"policy": "selective", "contiguous": True}):
            config = {
                "zero": {"stage": stage, "bucket_numel": 1},
                "optimizer": ADAMW,
                "precision": precision,
                "recompute": recompute,
            }
            digests.append(train_on_engine(model, batches, config).digest)
        assert len(set(digests)) == 1, (stage, precision)


@ranks(2)
def test_evaluation_between_forward_and_backward_and_frozen_blocks(world_size: int):
    batch = token_batches(1, 1)[0][0]
    ends = []
    for recompute in (None, {"tier": "host"}):
        net = TinyGPT(layers=3, frozen=True)
        config = {"zero": {"stage": 3, "bucket_numel": 1}, "optimizer": ADAMW, "recompute": recompute}
        with trilithon.initialize(net, config) as engine:
            loss = engine(*batch)
            engine.eval_step(batch)
            engine.backward(loss)
            engine.step()
            ends.append(dict(engine.full_parameters()))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@ranks(2)
def test_a_recomputed_block_of_tiled_layers(world_size: int):
    batches = token_batches(2, 2)
    runs = []
    for recompute in (None, {"tier": "host"}, {"policy": "selective"}):
        zero = {"stage": 3, "tile_above_numel": 1024, "bucket_numel": 1}
        runs.append(train_on_engine(model, batches, {"zero": zero, "optimizer": ADAMW, "recompute": recompute}))
    assert runs[0].digest == runs[1].digest == runs[2].digest
