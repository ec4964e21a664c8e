"""Runs that are saved and go on: a model with everything that is awkward to save, and what a run consists of.

`everything(engine)` is compared bit for bit: whole fp32 weights, every field of the optimizer, buffers, counters,
rates, loss scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trilithon
from trilithon.testing.engine_run import digest_of
from trilithon.testing.parity import Batch, rank_part, vector_batches

ADAM = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1}
PRECISIONS = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": {"kind": "fp16", "initial_scale_power": 18, "window": 2, "hysteresis": 1},  # overflows at first, then grows
}


class OddNet(nn.Module):
    """Dropout, shared and frozen layers, one that is used now and then, empty and one-element parameters, buffers."""

    def __init__(self, seed: int = 0, width: int = 12) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(8, width)
            self.shared = nn.Linear(width, width)
            self.frozen = nn.Linear(width, width)
            self.rare = nn.Linear(width, width)
            self.last = nn.Linear(width, 4)
            self.gain = nn.Parameter(torch.rand(()))
            self.one = nn.Parameter(torch.rand(1))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.register_buffer("seen", torch.tensor(seed))
            self.register_buffer("mean", torch.rand(width))
            self.register_buffer("scratch", torch.rand(3), persistent=False)
        self.same = self.shared
        self.drop = nn.Dropout(0.2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        self.seen += 1
        x = self.drop(torch.tanh(self.first(x)))
        x = torch.tanh(self.same(x)) + self.shared(self.frozen(x)) * self.gain
        with torch.no_grad():
            self.mean.lerp_(x.float().mean(0), 0.5)
        if int(self.seen) % 7 == 0:
            x = x + self.rare(x)
        return F.mse_loss(self.last(x).float() * self.one.float(), target.float())


def settings(stage: int, precision: str = "fp32", accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    """Small buckets, so that several units and slices exist."""
    found = {
        "zero": {"stage": stage, "bucket_numel": 150},
        "precision": PRECISIONS[precision],
        "optimizer": ADAM,
        "lr_schedule": {"kind": "linear", "total_steps": 20, "warmup_steps": 3},
        "clip_norm": 0.5,
        "batch": {"accumulation": accumulation},
    }
    return {**found, **changes}


def batches(steps: int, accumulation: int = 1, *, rows: int = 8) -> list[list[Batch]]:
    return vector_batches(steps, rows, accumulation, width=8, out=4)


def train(engine: trilithon.Engine, steps: Sequence[Sequence[Batch]]) -> list[float]:
    """The mean loss of each step."""
    return [
        engine.train_step([rank_part(batch, engine.rank, engine.world_size) for batch in micro_batches])
        for micro_batches in steps
    ]


def fields_of(engine: trilithon.Engine, fields: Sequence[str] = ("exp_avg", "exp_avg_sq")) -> dict[str, Tensor]:
    """Masters and optimizer state, whole."""
    found = {f"master/{name}": tensor for name, tensor in engine.full_parameters()}
    for field in fields:
        found |= {f"{field}/{name}": tensor for name, tensor in engine.view(field)}
    return found


def everything(engine: trilithon.Engine, fields: Sequence[str] = ("exp_avg", "exp_avg_sq")) -> dict[str, Any]:
    plain = {
        "counters": (engine.steps, engine.skipped_steps, engine.micro_steps, engine.global_samples),
        "lr": engine.lr,
        "scale": engine.loss_scale,
        "update": engine._update.state_dict() if engine._sharding.slices() else None,
        "precision": engine._precision.state_dict(),
    }
    tensors = {**fields_of(engine, fields), **engine.state_dict()}
    return {**plain, **{name: digest_of([tensor]) for name, tensor in tensors.items()}}
