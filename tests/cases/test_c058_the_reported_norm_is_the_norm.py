"""One gradient norm, whatever the stage, the precision, the accumulation, and where it is read.

A system reported another norm at stage 0 than at the other stages. The engine's `grad_norm` (before clipping) has to be
that of plain PyTorch everywhere, and what a monitor writes has to be the engine's number. `step()` returns whether
weights changed and `train_step` the loss; neither returns a norm that could differ.
https://github.com/deepspeedai/DeepSpeed/issues/7837
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from trilithon.config import MonitorConfig
from trilithon.engine.engine import Engine
from trilithon.engine.monitor import Monitor
from trilithon.testing import ranks
from trilithon.testing.engine_run import train_on_engine
from trilithon.testing.models import SharedLayerNet
from trilithon.testing.parity import tolerance, train_plain, vector_batches

STEPS = 3


def record(engine: Engine, monitor: Monitor) -> None:
    assert engine.grad_norm is not None
    monitor.record(engine.steps, {"grad_norm": engine.grad_norm})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@ranks(2)
def test_engine_and_monitor_report_the_norm_of_plain_pytorch(precision: str, world_size: int, tmp_path: Path):
    scale = 256.0 if precision == "fp16" else 1.0
    kind = {"kind": precision, **({"loss_scale": scale} if precision == "fp16" else {})}
    for accumulation in (1, 4):
        batches = vector_batches(STEPS, rows=2 * world_size, accumulation=accumulation)
        plain = train_plain(
            SharedLayerNet, batches, precision=precision, world_size=world_size, clip_norm=0.1, missing="skip",
            loss_scale=scale / accumulation,
        )  # fmt: skip
        limit = tolerance(precision, STEPS).grad_norm
        for stage in (0, 1, 2, 3):
            folder = tmp_path / f"{accumulation}-{stage}"
            folder.mkdir(exist_ok=True)
            monitor = Monitor(MonitorConfig(folder=folder, every=1, quiet=True), rank=dist.get_rank())
            config = {"zero": {"stage": stage, "bucket_numel": 300}, "precision": kind, "clip_norm": 0.1}
            config["optimizer"] = {"kind": "adamw"}
            run = train_on_engine(SharedLayerNet, batches, config, note=lambda e, m=monitor: record(e, m))
            for expected, got in zip(plain.grad_norms, run.grad_norms, strict=True):
                assert abs(got - expected) <= limit * expected, (stage, accumulation, got, expected)
            monitor.close()
            if dist.get_rank() == 0:
                lines = (folder / "metrics.jsonl").read_text().splitlines()
                assert [json.loads(line)["grad_norm"] for line in lines] == run.grad_norms, (stage, accumulation)
