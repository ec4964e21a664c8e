"""What one side of a comparison writes down after each step, and how it is read back."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor


@dataclass(slots=True)
class StepRecord:
    """One step of one side; every tensor whole, on the CPU.

    loss: mean over ranks and micro-batches. gradients: averaged alike, before clipping, f32. parameters: after the
    update, f32. lr: per parameter group, as used.
    """

    loss: float
    changed: bool
    lr: list[float]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def write(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(asdict(self), folder / f"step-{step}.pt")

    @classmethod
    def read(cls, folder: Path, step: int) -> StepRecord:
        return cls(**torch.load(folder / f"step-{step}.pt", weights_only=True))


def grad_norm(record: StepRecord) -> float:
    """2-norm over all gradients, in double precision."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in record.gradients.values()))
