"""Rank 0 saves and rank 1 goes on training: both end within the limit, and the message names the call and the rank."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trilithon
from trilithon.checkpoint import open_checkpoint
from trilithon.comm.watchdog import EXIT_STATUS
from trilithon.errors import CheckpointError
from trilithon.testing import run_ranks_raw

LIMIT_S = 2.0


def save_alone(folder, stage):
    config = {"zero": {"stage": stage}, "optimizer": {"kind": "sgd", "lr": 0.1}, "comm": {"wait_limit_s": LIMIT_S}}
    engine = trilithon.initialize(nn.Linear(8, 1), config)
    if dist.get_rank() == 0:
        engine.save(folder)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 8)).mean())
        engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_lone_caller_is_named(stage, tmp_path):
    began = time.monotonic()
    results = run_ranks_raw(save_alone, 2, tmp_path / "runs", stage, timeout_s=40)
    said = "".join(result.output for result in results)
    assert [result.exit_code for result in results] == [EXIT_STATUS] * 2, said
    assert "engine.save, which every rank has to call" in said
    assert "missing: rank 1" in said or "rank 0 waits in group control" in said  # whichever wait is the older one
    assert "in save_alone" in said
    assert time.monotonic() - began < LIMIT_S + 15
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "runs")
