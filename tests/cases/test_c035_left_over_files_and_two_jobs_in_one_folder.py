"""C035: a killed run's files do not disturb the next one, and two jobs in one folder never touch each other's."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

import trilithon
from trilithon.engine.engine import Engine
from trilithon.testing import run_ranks, run_ranks_raw
from trilithon.testing.fork_server import Ending
from trilithon.testing.models import MLP


def engine_on(folder: Path, width: int) -> Engine:
    disk = {"state": "disk", "path": str(folder), "sub_group_numel": 192}
    config = {"zero": {"stage": 2}, "optimizer": {"kind": "adamw", "lr": 1e-2}, "offload": disk, "precision": "bf16"}
    return trilithon.initialize(MLP(width=width), config)


def killed_while_writing(folder: Path) -> None:
    engine = engine_on(folder, 64)
    engine.train_step([(torch.ones(2, 64), torch.ones(2, 4))])
    real = os.pwritev

    def die(descriptor: int, views: Any, offset: int) -> int:
        real(descriptor, [views[0][:4096]], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    os.pwritev = die
    engine.train_step([(torch.ones(2, 64), torch.ones(2, 4))])


def clean_run(folder: Path, width: int, steps: int = 1) -> list[torch.Tensor]:
    engine = engine_on(folder, width)
    for _ in range(steps):
        engine.train_step([(torch.ones(2, width), torch.ones(2, 4))])
    found = [tensor for _, tensor in engine.full_parameters()]
    engine.close()
    return found


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_after_a_kill_a_run_with_other_shapes_starts_clean(tmp_path):
    ended = run_ranks_raw(killed_while_writing, 2, tmp_path / "used", timeout_s=30, end_on_failure=True)
    assert any(result.ending is Ending.KILLED for result in ended), [result.ending for result in ended]
    assert list((tmp_path / "used").glob("*/state")), "the killed run left nothing, so nothing is tested"
    found, expected = (run_ranks(clean_run, 2, tmp_path / name, 96) for name in ("used", "fresh"))
    assert equal(found[0], expected[0])
    assert not (tmp_path / "used").exists()


def both_jobs(folder: Path, alone: Path) -> bool:
    """Two engines with state of other shapes in one folder, their steps taking turns, against each alone."""
    first, second = engine_on(folder, 64), engine_on(folder, 96)
    for _ in range(3):
        for engine, width in ((first, 64), (second, 96)):
            engine.train_step([(torch.ones(2, width), torch.ones(2, 4))])
    found = [[tensor for _, tensor in engine.full_parameters()] for engine in (first, second)]
    first.close()
    second.train_step([(torch.ones(2, 96), torch.ones(2, 4))])  # the end of one job leaves the other's files
    second.close()
    expected = [clean_run(alone, width, steps=3) for width in (64, 96)]
    return all(equal(one, other) for one, other in zip(found, expected, strict=True))


def test_two_jobs_in_one_folder_train_as_if_alone(tmp_path):
    assert run_ranks(both_jobs, 2, tmp_path / "shared", tmp_path / "alone") == [True, True]
    assert not (tmp_path / "shared").exists()
