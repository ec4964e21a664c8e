"""An engine loads what DeepSpeed saved, and its next steps are those that DeepSpeed itself made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import trilithon
from trilithon.checkpoint import convert
from trilithon.errors import CheckpointError
from trilithon.testing import ranks, run_ranks
from trilithon.testing.tolerance import tolerance

GOLDEN = Path(__file__).parents[2] / "data" / "deepspeed"
sys.path.insert(0, str(GOLDEN))

import golden_model  # noqa: E402

WRITERS = {"zero2_fp32_four_ranks": 4, "zero3_fp32_three_ranks": 3}  # ranks that saved, where they are not 2
CASES = [  # what was saved, and the stage at which it is loaded
    ("zero1_fp32", 3),
    ("zero3_fp32", 1),
    ("zero1_fp16", 2),
    ("zero2_bf16", 0),
    ("zero3_bf16", 3),
    ("zero1_bf16_fp32_gradients", 1),
    ("zero2_fp32_round_robin", 3),
    ("zero2_fp32_four_ranks", 2),
    ("universal_from_zero1_fp16", 1),
    ("universal_from_zero3_bf16", 3),
]


def engine_like(case, stage):
    """As one would build it from the DeepSpeed file that wrote `case`, with other weights and another loss scale."""
    writers = WRITERS.get(case, 2)
    model = golden_model.build_model()
    for param in model.parameters():
        torch.nn.init.constant_(param, 0.25)  # what is not loaded shows
    kind = precision(case)
    low = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}}}
    config = {
        "train_micro_batch_size_per_gpu": golden_model.ROWS,
        "gradient_accumulation_steps": writers // dist.get_world_size(),
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage},
        **low.get(kind, {}),
    }
    return trilithon.initialize(model, config, parameters=golden_model.groups(model))


def precision(case):
    return next((kind for kind in ("bf16", "fp16") if kind in case), "fp32")


def masters(engine):
    return {name: tensor.clone() for name, tensor in engine._sharding.full("master", engine._sharding.trainable_names)}


def go_on(engine, case):
    """The two steps after the checkpoint; each rank takes the batches of as many ranks as it stands for."""
    share = WRITERS.get(case, 2) // engine.world_size
    for step in range(golden_model.STEPS_SAVED, golden_model.STEPS_SAVED + golden_model.STEPS_AFTER):
        mine = range(engine.rank * share, (engine.rank + 1) * share)
        engine.train_step([golden_model.batch(step, rank) for rank in mine])


@ranks(1, 2)
@pytest.mark.parametrize("case, stage", CASES)
def test_a_deepspeed_checkpoint_goes_on_as_deepspeed_did(world_size, case, stage):
    engine = engine_like(case, stage)
    report = engine.load(GOLDEN / case)
    expected = load_file(GOLDEN / case / "expected.safetensors")
    start = masters(engine)
    for name, values in start.items():
        assert torch.equal(values, expected[f"master.{name}"]), name
    assert torch.equal(engine.module.get_buffer("mean"), expected["buffer.mean"])
    assert engine.module.get_buffer("seen") == expected["buffer.seen"]
    assert report.client_state == {"note": "golden", "epoch": 2}
    assert report.initialised == {"random": ["random"]}
    assert (engine.steps, engine.lr) == (3, [0.01, 0.005])
    assert engine.loss_scale == (256.0 if "fp16" in case else 1.0)
    go_on(engine, case)
    limit = tolerance(precision(case), steps=golden_model.STEPS_AFTER).distance
    for name, values in masters(engine).items():
        after = expected[f"continued.{name}"]
        assert (values - after).norm() <= limit * (after - start[name]).norm(), name
    assert engine.steps == 5
    engine.close()


@ranks(1)
def test_without_zero_the_optimizer_state_has_no_names_and_strict_says_so(world_size):
    engine = engine_like("zero0_fp32", 1)
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        engine.load(GOLDEN / "zero0_fp32")
    engine.load(GOLDEN / "zero0_fp32", parts=("weights",))
    expected = load_file(GOLDEN / "zero0_fp32" / "expected.safetensors")
    for name, values in masters(engine).items():
        assert torch.equal(values, expected[f"master.{name}"]), name
    engine.close()


def load_converted(folder):
    engine = engine_like("zero3_bf16", 2)
    engine.load(folder)
    found = masters(engine), engine.lr, engine.steps
    engine.close()
    return found


def test_what_convert_makes_of_it_loads_alike(tmp_path):
    convert(GOLDEN / "zero3_bf16", tmp_path)
    expected = load_file(GOLDEN / "zero3_bf16" / "expected.safetensors")
    for values, rates, steps in run_ranks(load_converted, 2, str(tmp_path)):
        assert (rates, steps) == ([0.01, 0.005], 3)
        for name, tensor in values.items():
            assert torch.equal(tensor, expected[f"master.{name}"]), name
