"""Runs with experts and of pipelines go on from DeepSpeed's files, with the steps that DeepSpeed itself made."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trilithon
from trilithon.checkpoint.deepspeed_experts import native_name
from trilithon.checkpoint.deepspeed_pipeline import renamed
from trilithon.testing import ranks
from trilithon.testing.tolerance import tolerance

GOLDEN = Path(__file__).parents[2] / "data" / "deepspeed"
sys.path.insert(0, str(GOLDEN))

import golden_parallel_models as golden  # noqa: E402


def masters(engine):
    return {name: tensor.clone() for name, tensor in engine._sharding.full("master", engine._sharding.trainable_names)}


def expected(case, part):
    """Whole tensors under our names, experts stacked."""
    found, experts = {}, {}
    for key, value in load_file(GOLDEN / case / "expected.safetensors").items():
        if not key.startswith(f"{part}."):
            continue
        name = key.partition(".")[2]
        match = re.search(r"deepspeed_experts\.(\d+)\.", name)
        target = native_name(renamed(name, {"embed": 0}))
        if match:
            experts.setdefault(target, {})[int(match[1])] = value
        else:
            found[target] = value
    return found | {name: torch.stack([each[e] for e in sorted(each)]) for name, each in experts.items()}


def config(case, stage, accumulation=1):
    adam = {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True}}
    low = {"bf16": {"enabled": True}} if "bf16" in case else {}
    return {
        "train_micro_batch_size_per_gpu": golden.ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": adam,
        "zero_optimization": {"stage": stage},
        **low,
    }


def blank(model):
    for param in model.parameters():
        torch.nn.init.constant_(param, 0.25)  # what is not loaded shows
    return model


def check(engine, case, go_on):
    report = engine.load(GOLDEN / case)
    start, before, after = masters(engine), expected(case, "master"), expected(case, "continued")
    assert set(start) == set(before)
    for name, values in start.items():
        assert torch.equal(values, before[name]), name
    assert engine.steps == golden.STEPS_SAVED and report.client_state == {"note": "golden"}
    go_on()
    limit = tolerance("bf16" if "bf16" in case else "fp32", steps=golden.STEPS_AFTER).distance
    for name, values in masters(engine).items():
        assert (values - after[name]).norm() <= limit * (after[name] - before[name]).norm(), name
    engine.close()


def experts_model(degrees):
    def layer(degree):
        return trilithon.MoE(
            golden.WIDTH, golden.Expert(), golden.EXPERTS, ep_size=degree, k=1, capacity_factor=float(golden.EXPERTS),
            min_capacity=1, use_rts=False,
        )  # fmt: skip

    return blank(golden.ExpertsModel([partial(layer, degree) for degree in degrees]))


@ranks(1, 2)
@pytest.mark.parametrize(
    ("case", "degrees", "writers", "stage"),
    [
        ("moe_zero1_fp32", [2], 2, 3),
        ("moe_zero2_bf16", [1], 2, 1),
        ("moe_zero2_fp32_four_ranks", [2, 4], 4, 2),
    ],
)
def test_a_run_with_experts_goes_on_as_deepspeed_did(world_size, case, degrees, writers, stage):
    share = writers // world_size
    model = experts_model([min(degree, world_size) for degree in degrees])
    engine = trilithon.initialize(model, config(case, stage, share))
    for group in engine._groups:
        group["weight_decay"] = 0.1

    def go_on():
        for step in range(golden.STEPS_SAVED, golden.STEPS_SAVED + golden.STEPS_AFTER):
            mine = range(engine.rank * share, (engine.rank + 1) * share)
            engine.train_step([golden.batch(step, rank) for rank in mine])

    check(engine, case, go_on)


@ranks(1, 2)
@pytest.mark.parametrize(
    ("case", "tied", "replicas"), [("pipe_zero1_fp32", True, 1), ("pipe_zero1_bf16_four_ranks", False, 2)]
)
def test_a_pipeline_goes_on_without_one_as_deepspeed_did(world_size, case, tied, replicas):
    parts = [(replica, micro) for replica in range(replicas) for micro in range(golden.MICRO_BATCHES)]
    share = len(parts) // world_size
    model = blank(golden.Straight(2, tied=tied))
    engine = trilithon.initialize(model, config(case, 2, share))

    def go_on():
        for step in range(golden.STEPS_SAVED, golden.STEPS_SAVED + golden.STEPS_AFTER):
            mine = parts[engine.rank * share : (engine.rank + 1) * share]
            engine.train_step([golden.batch(step, replica, micro) for replica, micro in mine])

    check(engine, case, go_on)
