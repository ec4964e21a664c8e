"""What the engine did over the same batches as the one-process reference, on every rank.

    run = train_on_engine(TinyGPT, batches, {"zero": {"stage": 2}, "optimizer": {"kind": "adamw", "lr": 1e-3}})
    assert_same_training(reference, run.losses, run.parameters, tolerance("fp32", steps=5), run.grad_norms)

`digest` covers every bit that a rank holds or reports, so ranks that agree have equal digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trilithon.engine.build import initialize
from trilithon.engine.engine import Engine
from trilithon.testing.parity import Batch, rank_part

__all__ = ["EngineRun", "digest_of", "train_on_engine"]


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One run as one rank saw it. parameters: whole fp32 values by name, frozen ones too, tied ones once."""

    losses: list[float]
    grad_norms: list[float]
    clip_factors: list[float]
    parameters: dict[str, Tensor]
    digest: str
    noted: list[Any]  # what `note` returned after each step


def train_on_engine(
    make_model: Callable[[], nn.Module],
    batches: Sequence[Sequence[Batch]],
    config: Mapping[str, Any],
    *,
    optimizer: Any = None,
    lr_schedule: Any = None,
    note: Callable[[Engine], Any] | None = None,
) -> EngineRun:
    """Train on this rank's rows of `batches[step][micro_step]`; the batch section of the configuration is filled in.

    Collective. note: called after each step, on every rank alike.
    """
    accumulation = len(batches[0])
    sizes = {"global_size": batches[0][0][0].shape[0] * accumulation, "accumulation": accumulation}
    losses, norms, factors, noted = [], [], [], []
    with initialize(make_model(), {**config, "batch": sizes}, optimizer, lr_schedule) as engine:
        for micro_batches in batches:
            parts = [rank_part(batch, engine.mesh.data_rank, engine.mesh.data_size) for batch in micro_batches]
            losses.append(engine.train_step(parts))
            assert engine.grad_norm is not None and engine.clip_factor is not None
            norms.append(engine.grad_norm)
            factors.append(engine.clip_factor)
            if note is not None:
                noted.append(note(engine))
        parameters = dict(engine.full_parameters())
        whole = list(engine.state_dict().values())
        held = whole if engine.config.zero.stage == 3 else [p.detach() for p in engine.module.parameters()]
        digest = digest_of([torch.tensor([losses, norms, factors]), *parameters.values(), *whole, *held])
    return EngineRun(losses, norms, factors, parameters, digest, noted)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Equal for equal bits (a zero and its negative differ)."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
