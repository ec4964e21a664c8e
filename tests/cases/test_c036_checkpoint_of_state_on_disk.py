"""C036: a checkpoint of state that rests on disk is whole: it survives the disk's folder and resumes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trilithon
from trilithon.engine.engine import Engine
from trilithon.testing import run_ranks
from trilithon.testing.models import TinyGPT
from trilithon.testing.parity import rank_part, token_batches

BATCHES = token_batches(6, 4)


def engine_on(offload: dict[str, Any], zero_stage: int) -> Engine:
    config = {"zero": {"stage": zero_stage}, "precision": "bf16", "optimizer": {"kind": "adamw", "lr": 1e-2}}
    return trilithon.initialize(TinyGPT(frozen=True), {**config, "offload": offload})


def train(engine: Engine, first: int, last: int) -> None:
    for (batch,) in BATCHES[first:last]:
        engine.train_step([rank_part(batch, engine.rank, engine.world_size)])


def values(engine: Engine) -> list[Tensor]:
    return [tensor for kind in ("master", "exp_avg", "exp_avg_sq", "param") for _, tensor in engine.view(kind)]


def uninterrupted(offload: dict[str, Any], zero_stage: int, folder: Path | None) -> list[Tensor]:
    """Six steps; with a folder, saved after the third."""
    engine = engine_on(offload, zero_stage)
    train(engine, 0, 3)
    if folder is not None:
        engine.save(folder)
    train(engine, 3, 6)
    found = values(engine)
    engine.close()
    return found


def resumed(offload: dict[str, Any], zero_stage: int, folder: Path) -> list[Tensor]:
    engine = engine_on(offload, zero_stage)
    engine.load(folder)
    train(engine, 3, 6)
    found = values(engine)
    engine.close()
    return found


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_save_delete_the_folder_load_elsewhere_and_go_on(tmp_path, zero_stage):
    disk = {"state": "disk", "path": str(tmp_path / "scratch"), "sub_group_numel": 512}
    saved = tmp_path / "saved"
    expected = run_ranks(uninterrupted, 2, {}, zero_stage, None)[0]
    found = run_ranks(uninterrupted, 2, disk, zero_stage, saved)[0]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert not (tmp_path / "scratch").exists(), "the run made it, so it took it along"
    folder_of_a_run = b"scratch/trilithon-"
    assert not [path for path in saved.rglob("*") if path.is_file() and folder_of_a_run in path.read_bytes()]
    for offload in (disk, {}, {"state": "host"}, {**disk, "ratio": 0.5}):
        found = run_ranks(resumed, 2, offload, zero_stage, saved)[0]
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)), offload
