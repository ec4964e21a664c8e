"""accelerate's own loop: accumulate, clip_grad_norm_, save_state and load_state, get_state_dict, unwrap_model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds_files
import plain_training
import pytest
import torch
from launching import Finished, RankServer
from published import Published
from torch import nn

STEPS, RATE = 4, 1e-2


def decayed_adamw(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)


def run_loop(
    ranks: RankServer, published: Published, folder: Path, *args: object, world: int, **launch: Any
) -> Finished:
    return ranks.run(
        "accelerate_finetune.py",
        folder,
        *("--model", published.llama, "--text", published.text, "--output_dir", folder, "--learning_rate", RATE),
        *args,
        world_size=world,
        ACCELERATE_USE_DEEPSPEED="true",
        **launch,
    )


def reference(published: Published, parts: int, rates: plain_training.Rates, **how: Any) -> plain_training.Plain:
    updates = plain_training.updates_of(published.text, published.llama, STEPS, parts)
    model = plain_training.load(published.llama)
    return plain_training.train(model, updates, rates=rates, make=decayed_adamw, **how)


def held_out_loss(published: Published, plain: plain_training.Plain, **how: Any) -> float:
    batches = plain_training.updates_of(published.text, published.llama, 1, 4, first=512)[0]
    return plain_training.evaluate(plain.model, batches, **how)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_loop_equals_plain_training(
    ranks: RankServer, published: Published, tmp_path: Path, stage: int, world: int
) -> None:
    """A torch optimizer and schedule made by the script; state saved after two updates and gone on from."""
    options = ("--zero_stage", stage, "--gradient_accumulation_steps", 2)
    done = run_loop(ranks, published, tmp_path / "a", *options, "--save_after", 2, world=world)
    plain = reference(published, 2 * world, plain_training.linear_decay(RATE, 8))
    report = done.report()
    assert report["losses"] == pytest.approx(plain.losses, rel=1e-4)
    assert report["rates"] == pytest.approx([RATE * (1 - n / 8) for n in range(1, STEPS + 1)], rel=1e-6)
    if stage > 0:
        assert report["norms"] == pytest.approx(plain.norms, rel=1e-3)
    assert report["eval_loss"] == pytest.approx(held_out_loss(published, plain), rel=1e-4)
    assert report["model_class"] == "LlamaForCausalLM"
    written = plain_training.load(tmp_path / "a" / "model").state_dict()
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(written[name], value, rtol=1e-3, atol=1e-4)

    again = run_loop(
        ranks,
        published,
        tmp_path / "b",
        *options,
        *("--resume_from", tmp_path / "a" / "state", "--first_update", 2, "--steps", 2),
        world=world,
    ).report()
    assert again["losses"] == pytest.approx(report["losses"][2:], rel=1e-6)
    assert again["rates"] == pytest.approx(report["rates"][2:], rel=1e-9)


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 1), (2, 2), (3, 1), (3, 2)])
def test_bf16(ranks: RankServer, published: Published, tmp_path: Path, stage: int, world: int) -> None:
    options = ("--zero_stage", stage, "--mixed_precision", "bf16", "--gradient_accumulation_steps", 2)
    report = run_loop(ranks, published, tmp_path, *options, world=world).report()
    plain = reference(published, 2 * world, plain_training.linear_decay(RATE, 8), bf16=True)
    assert report["losses"] == pytest.approx(plain.losses, rel=2**-7)
    assert report["eval_loss"] == pytest.approx(held_out_loss(published, plain, bf16=True), rel=2**-7)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_file_with_optimizer_and_schedule(
    ranks: RankServer, published: Published, tmp_path: Path, stage: int
) -> None:
    """DummyOptim and DummyScheduler stand for what the file brings, here with its optimizer's state on the host."""
    config = ds_files.for_a_client(stage)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config["optimizer"]["params"] = {"lr": "auto", "weight_decay": "auto"}
    path = ds_files.write(tmp_path, config)
    report = run_loop(ranks, published, tmp_path, "--deepspeed_config", path, world=2).report()
    plain = reference(published, 2, plain_training.warmup_decay(RATE, 2, 8))
    assert report["losses"] == pytest.approx(plain.losses, rel=1e-4)
