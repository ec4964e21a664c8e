"""What clients save through `deepspeed`, `trilithon checkpoint` reads: inspect, verify, and export to plain weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ds_files
import pytest
import torch
from launching import RankServer
from published import Published
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from trilithon.cli.checkpoint import app

LLAMA, PIPELINE, EXPERTS = 21, 1 + 4 * 6 + 2, 1 + 2 + 1 + 1 + 4  # parameters; those of all experts are stacked


def call(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.output


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint after two steps, and the weights that the client wrote of them beside it, if it did."""

    folder: Path
    zero_stage: int
    parameters: int  # that are trained
    weights: dict[str, Tensor]


def text_arguments(published: Published, folder: Path, *, model: str = "--model") -> tuple[object, ...]:
    return (model, published.llama, "--text", published.text, "--output_dir", folder)


def trainer_arguments(folder: Path, stage: int) -> tuple[object, ...]:
    config = ds_files.write(folder, ds_files.for_a_client(stage, optimizer=False))
    return (
        *("--deepspeed", config, "--accelerator_config", '{"use_configured_state": true}'),
        *("--max_steps", 2, "--save_steps", 2, "--per_device_train_batch_size", 2),
        *("--report_to", "none", "--disable_tqdm", "true", "--dataloader_pin_memory", "false"),
    )


def loop_arguments(folder: Path, config: dict[str, Any]) -> tuple[object, ...]:
    return ("--deepspeed", "--deepspeed_config", ds_files.write(folder, config), "--steps", 2)


def by_trainer(ranks: RankServer, published: Published, folder: Path) -> Saved:
    arguments = (*text_arguments(published, folder), *trainer_arguments(folder, 3), "--train_blocks", 8)
    ranks.run("trainer_finetune.py", folder, *arguments, world_size=2)
    return Saved(folder / "checkpoint-2", 3, LLAMA, load_file(folder / "model.safetensors"))


def by_peft(ranks: RankServer, published: Published, folder: Path) -> Saved:
    """Two projections of two layers have two factors each; the frozen weights are in the checkpoint as well."""
    arguments = (*text_arguments(published, folder), *trainer_arguments(folder, 2), "--train_blocks", 8)
    ranks.run("trainer_finetune.py", folder, *arguments, "--lora_rank", 4, world_size=2)
    adapter = load_file(folder / "adapter_model.safetensors")
    named = {name.replace("_A.weight", "_A.default.weight"): value for name, value in adapter.items()}
    named = {name.replace("_B.weight", "_B.default.weight"): value for name, value in named.items()}
    return Saved(folder / "checkpoint-2", 2, 8, named)


def by_trl(ranks: RankServer, published: Published, folder: Path) -> Saved:
    arguments = (*text_arguments(published, folder), *trainer_arguments(folder, 1), "--train_texts", 8)
    ranks.run("sft_train.py", folder, *arguments, "--max_length", 48, "--bf16", "false", world_size=1)
    return Saved(folder / "checkpoint-2", 1, LLAMA, load_file(folder / "model.safetensors"))


def by_accelerate(ranks: RankServer, published: Published, folder: Path) -> Saved:
    arguments = (*text_arguments(published, folder), "--zero_stage", 2, "--steps", 2, "--save_after", 2)
    ranks.run("accelerate_finetune.py", folder, *arguments, world_size=2, ACCELERATE_USE_DEEPSPEED="true")
    return Saved(folder / "state", 2, LLAMA, load_file(folder / "model" / "model.safetensors"))


def by_lightning(ranks: RankServer, published: Published, folder: Path) -> Saved:
    arguments = (*text_arguments(published, folder), "--zero_stage", 1, "--steps", 2)
    lifted = {"preludes": ("lightning_on_cpu.py",), "LIGHTNING_EXTERNAL": "1"}
    ranks.run("lightning_train.py", folder, *arguments, world_size=1, **lifted)
    return Saved(folder / "fit.ckpt", 1, LLAMA, {})


def by_the_loop(ranks: RankServer, published: Published, folder: Path) -> Saved:
    arguments = text_arguments(published, folder, model="--tokenizer")
    ranks.run(
        "deepspeed_train.py", folder, *arguments, *loop_arguments(folder, ds_files.for_a_loop(3, 2, 1)), world_size=2
    )
    weights = torch.load(folder / "fp32.pt")
    return Saved(folder, 3, len(weights), weights)


def by_the_pipeline(ranks: RankServer, published: Published, folder: Path) -> Saved:
    """The head is the embedding, which both stages hold."""
    config = {**ds_files.for_a_loop(1, 1, 4), "zero_optimization": {"stage": 1}}
    arguments = (*text_arguments(published, folder, model="--tokenizer"), *loop_arguments(folder, config))
    ranks.run("pipeline_train.py", folder, *arguments, "--stages", 2, world_size=2)
    return Saved(folder, 1, PIPELINE, {})


def by_experts(ranks: RankServer, published: Published, folder: Path) -> Saved:
    arguments = (
        *text_arguments(published, folder, model="--tokenizer"),
        *loop_arguments(folder, ds_files.for_a_loop(2, 2, 1)),
    )
    ranks.run("moe_train.py", folder, *arguments, "--experts", 4, "--ep_size", 2, "--k", 1, world_size=2)
    return Saved(folder, 2, EXPERTS, {})


CLIENTS = (by_trainer, by_peft, by_trl, by_accelerate, by_lightning, by_the_loop, by_the_pipeline, by_experts)


@pytest.mark.parametrize("client", CLIENTS)
def test_checkpoints_of_clients_are_read(ranks: RankServer, published: Published, tmp_path: Path, client: Any) -> None:
    saved = client(ranks, published, tmp_path / "run")
    latest = saved.folder / "latest"  # lightning names its checkpoint itself and leaves this out
    tag = ("--tag", latest.read_text().strip() if latest.exists() else "checkpoint")
    found = json.loads(call("inspect", saved.folder, *tag, "--names", "--json"))
    assert (found["step"], found["zero_stage"]) == (2, saved.zero_stage)
    assert "whole" in call("verify", saved.folder, *tag)
    call("export", saved.folder, tmp_path / "exported", *tag, "--dtype", "fp32")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert len(exported) >= saved.parameters
    assert len({tensor["name"] for tensor in found["tensors"] if tensor["part"] == "master"}) == saved.parameters
    for name, value in saved.weights.items():
        torch.testing.assert_close(exported[name], value, rtol=0, atol=0)
