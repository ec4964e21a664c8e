"""The combinations of the parity matrix and what one rank runs of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from trilithon.engine.engine import Engine
from trilithon.testing.engine_run import EngineRun, train_on_engine
from trilithon.testing.models import TinyGPT
from trilithon.testing.parity import Batch, PlainRun, token_batches, train_plain

STEPS = {"fp32": 3, "bf16": 2, "fp16": 2}  # the second is the first with moments
MORE_STEPS = 5  # in fp32, behind the mark `exhaustive`
LR = {"adamw": 1e-3, "lamb": 1e-3, "sgd": 1e-1}
CLIP = 0.25  # below every norm of these runs
FP16_SCALE = 2.0**14  # lifts small gradients above the subnormal numbers of fp16, large ones stay far below its end
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.01},
    "lamb": {"weight_decay": 0.01},
    "sgd": {"momentum": 0.9},
}


def model() -> TinyGPT:
    """Tied embeddings, frozen positions and first block, a layer that no forward calls."""
    return TinyGPT(dim=16, layers=2, context=8, tied=True, frozen=True, unused=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """What the reference depends on."""

    optimizer: str
    accumulation: int
    clip_norm: float

    def batches(self, steps: int, world_size: int) -> list[list[Batch]]:
        return token_batches(steps, rows=2 * world_size, accumulation=self.accumulation, length=9)

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.accumulation} micro-batches, clip {self.clip_norm or 'off'}"


SETTINGS = [Setting(*parts) for parts in itertools.product(("adamw", "lamb", "sgd"), (1, 3), (0.0, CLIP))]
STAGES = (0, 1, 2, 3)


def reference(setting: Setting, precision: Any, world_size: int, steps: int) -> PlainRun:
    """One process; like every loop that accumulates it takes the backward of loss / micro-batches.

    Where the division happens matters in a low precision: by 3, it changes the rounding of everything in backward.
    In fp32 it sees each global micro-batch whole; in a low precision the parts of ranks one by one, whose gradients are
    rounded one by one.
    """
    scale = FP16_SCALE if precision == "fp16" else 1.0
    return train_plain(
        model,
        setting.batches(steps, world_size),
        optimizer=setting.optimizer,
        lr=LR[setting.optimizer],
        precision=precision,
        world_size=1 if precision == "fp32" else world_size,
        clip_norm=setting.clip_norm,
        loss_scale=scale / setting.accumulation,
        missing="skip",
        **OPTIONS[setting.optimizer],
    )


def run_matrix(precision: str, world_size: int, steps: int) -> list[tuple[int, Setting, EngineRun]]:
    """Every stage with every setting, on this rank. One call, since starting ranks costs more than training this."""
    return [
        (stage, setting, run_one(stage, setting, precision, world_size, steps))
        for setting in SETTINGS
        for stage in STAGES
    ]


def run_one(stage: int, setting: Setting, precision: str, world_size: int, steps: int) -> EngineRun:
    kind = {"kind": precision, **({"loss_scale": FP16_SCALE} if precision == "fp16" else {})}
    config = {
        "zero": {"stage": stage, "bucket_numel": 300 if stage == 3 else 2000},
        "precision": kind,
        "optimizer": {"kind": setting.optimizer, "lr": LR[setting.optimizer], **OPTIONS[setting.optimizer]},
        "clip_norm": setting.clip_norm,
    }
    return train_on_engine(model, setting.batches(steps, world_size), config, note=sharded_units)


def sharded_units(engine: Engine) -> int:
    """How many units are gathered for their use and freed after it."""
    return sum(not unit.whole_values for unit in engine._sharding.units)
