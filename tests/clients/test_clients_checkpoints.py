"""What clients save through `deepspeed`, `trilithon checkpoint` reads: inspect, verify, and export to plain weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ds_files
import pytest
import torch
from launching import RankServer
from published import Published
from safetensors.torch import load_file
from typer.testing import CliRunner

from trilithon.cli.checkpoint import app

ACCELERATE = {"ACCELERATE_USE_DEEPSPEED": "true"}
LIGHTNING = {"preludes": ("lightning_on_cpu.py",), "LIGHTNING_EXTERNAL": "1"}


def call(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.output


def by_trainer(ranks: RankServer, published: Published, folder: Path) -> tuple[Path, Path, int]:
    config = ds_files.for_a_client(3, optimizer=False)
    ranks.run(
        "trainer_finetune.py",
        folder,
        *("--model", published.llama, "--text", published.text, "--output_dir", folder),
        *("--deepspeed", ds_files.write(folder, config), "--accelerator_config", '{"use_configured_state": true}'),
        *("--train_blocks", 8, "--max_steps", 2, "--save_steps", 2, "--per_device_train_batch_size", 2),
        *("--report_to", "none", "--disable_tqdm", "true"),
        world_size=2,
    )
    return folder / "checkpoint-2", folder, 3


def by_accelerate(ranks: RankServer, published: Published, folder: Path) -> tuple[Path, Path, int]:
    ranks.run(
        "accelerate_finetune.py",
        folder,
        *("--model", published.llama, "--text", published.text, "--output_dir", folder),
        *("--zero_stage", 2, "--steps", 2, "--save_after", 2),
        world_size=2,
        **ACCELERATE,
    )
    return folder / "state", folder / "model", 2


def by_lightning(ranks: RankServer, published: Published, folder: Path) -> tuple[Path, Path, int]:
    ranks.run(
        "lightning_train.py",
        folder,
        *("--model", published.llama, "--text", published.text, "--output_dir", folder),
        *("--zero_stage", 1, "--steps", 2),
        world_size=1,
        **LIGHTNING,
    )
    return folder / "fit.ckpt", folder, 1


@pytest.mark.parametrize("client", [by_trainer, by_accelerate, by_lightning])
def test_checkpoints_of_clients_are_read(ranks: RankServer, published: Published, tmp_path: Path, client: Any) -> None:
    saved, written, stage = client(ranks, published, tmp_path / "run")
    if not (saved / "latest").exists():  # lightning names its checkpoint itself and leaves `latest` out
        tag = ("--tag", "checkpoint")
    else:
        tag = ("--tag", (saved / "latest").read_text().strip())
    found = json.loads(call("inspect", saved, *tag, "--names", "--json"))
    assert (found["step"], found["zero_stage"]) == (2, stage)
    assert "whole" in call("verify", saved, *tag)
    call("export", saved, tmp_path / "exported", *tag, "--dtype", "fp32")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    kept = {tensor["name"] for tensor in found["tensors"] if tensor["part"] == "master"}
    assert len(kept) == 21  # every parameter of the published llama, each with its fp32 values
    if (written / "model.safetensors").exists():
        for name, value in load_file(written / "model.safetensors").items():
            torch.testing.assert_close(exported[name], value, rtol=0, atol=0)
