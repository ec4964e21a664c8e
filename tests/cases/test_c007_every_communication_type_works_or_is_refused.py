"""Gradients may travel in another type than the parameters have: every pair trains.

A system accepted a communication type of its own and then failed inside the reduction after a few steps. All nine pairs
of {fp32, bf16, fp16} train here, at each stage, with one micro-batch and with three.
https://github.com/deepspeedai/DeepSpeed/issues/7653
"""

from __future__ import annotations

import itertools

import pytest

from trilithon.testing import ranks
from trilithon.testing.engine_run import train_on_engine
from trilithon.testing.models import MLP
from trilithon.testing.parity import train_plain, vector_batches

TYPES = ("fp32", "bf16", "fp16")
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(2)
def test_all_nine_pairs_train(stage: int, world_size: int):
    """SGD: a step is off by no more than its gradient is, and that by two roundings of the coarser type."""
    for accumulation in (1, 3):
        batches = vector_batches(5, rows=2 * world_size, accumulation=accumulation)
        for parameters, wire in itertools.product(TYPES, TYPES):
            kind = {"kind": parameters, **({"loss_scale": 256.0} if parameters == "fp16" else {})}
            config = {
                "zero": {"stage": stage, "comm_dtype": wire},
                "precision": kind,
                "optimizer": {"kind": "sgd", "lr": 0.1},
            }
            run = train_on_engine(
                MLP, batches, config, note=lambda engine: engine._sharding.exchange(engine.loss, "loss")
            )
            plain = train_plain(
                MLP, batches, optimizer="sgd", lr=0.1, precision=parameters, world_size=world_size,
                loss_scale=(256.0 if parameters == "fp16" else 1.0) / accumulation,
            )  # fmt: skip
            assert all(len(set(seen)) == 1 for seen in run.noted)
            limit = 4 * max(ROUNDING[parameters], ROUNDING[wire])
            for name, expected in plain.parameters.items():
                way = (expected - plain.start[name]).norm()
                apart = (run.parameters[name] - expected).norm()
                # and each of 5 steps rounds the weights to fp32
                assert apart <= limit * way + 10 * ROUNDING["fp32"] * expected.norm(), (
                    f"{parameters} parameters, {wire} on the wire, {accumulation} micro-batches: {name}"
                )
