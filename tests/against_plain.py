"""Train one model twice, with the engine and with plain PyTorch on one process, and hold the two against each other.

`loss_of(call, *part)` computes a rank's loss with `call`, which is the engine on one side and the model on the other.
The update is SGD with momentum, whose step is linear in the gradient: a wrong gradient shows, rounding does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import trilithon
from trilithon.testing.parity import Batch, PlainRun, assert_same_training, rank_part, tolerance, vector_batches

SGD = {"kind": "sgd", "lr": 0.1, "momentum": 0.9}
LossOf = Callable[..., Tensor]
STAGES = (0, 1, 2, 3)


def call_it(call: Any, *part: Tensor) -> Tensor:
    return call(*part)


def config(stage: int, *, accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    """bucket_numel=1: at stage 3 every module with parameters becomes a unit, so that gathers really happen."""
    zero = {"stage": stage, "bucket_numel": 1, **changes.pop("zero", {})}
    return {"batch": {"accumulation": accumulation}, "optimizer": SGD, "zero": zero, **changes}


def engine_for(model: nn.Module, stage: int, **changes: Any) -> trilithon.Engine:
    return trilithon.initialize(model, config(stage, **changes))


def train_plainly(
    make_model: Callable[[], nn.Module],
    batches: Sequence[Sequence[Batch]],
    world_size: int,
    loss_of: LossOf = call_it,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> PlainRun:
    """The reference. A parameter without a gradient sits the step out, as `grad` None does in torch.optim."""
    model = make_model()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainable = [p for p in model.parameters() if p.requires_grad]
    update = make_optimizer(model) if make_optimizer else torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
    losses, norms = [], []
    for micro_batches in batches:
        update.zero_grad(set_to_none=True)
        parts = [rank_part(batch, rank, world_size) for batch in micro_batches for rank in range(world_size)]
        total = 0.0
        for part in parts:
            loss = loss_of(model, *part)
            (loss / len(parts)).backward()
            total += loss.item()
        losses.append(total / len(parts))
        grads = [p.grad.to_dense() for p in trainable if p.grad is not None]
        norms.append(math.sqrt(sum(grad.double().square().sum().item() for grad in grads)))
        update.step()
    end = {name: p.detach().clone() for name, p in model.named_parameters()}
    return PlainRun(losses, norms, start, end)


def train_engine(
    engine: trilithon.Engine, batches: Sequence[Sequence[Batch]], loss_of: LossOf = call_it
) -> tuple[list[float], list[float]]:
    """Mean losses and gradient norms of the steps over this rank's parts."""
    losses, norms = [], []
    for micro_batches in batches:
        for batch in micro_batches:
            engine.backward(loss_of(engine, *rank_part(batch, engine.rank, engine.world_size)))
        assert engine.step()
        losses.append(engine.loss)
        norms.append(engine.grad_norm)
    return losses, norms


def assert_trains_like_plain(
    make_model: Callable[[], nn.Module],
    stage: int,
    *,
    batches: Sequence[Sequence[Batch]] | None = None,
    steps: int = 2,
    accumulation: int = 1,
    loss_of: LossOf = call_it,
    change: Callable[[nn.Module], object] = lambda model: model,
    **changes: Any,
) -> None:
    """change: applied to the engine's model only (compiled or checkpointed there, say); returns it, or None."""
    world_size = dist.get_world_size()
    batches = batches or vector_batches(steps, 2 * world_size, accumulation)
    model = make_model()
    changed = change(model)
    engine = engine_for(
        changed if isinstance(changed, nn.Module) else model, stage, accumulation=accumulation, **changes
    )
    losses, norms = train_engine(engine, batches, loss_of)
    got = {name.replace("_orig_mod.", ""): value for name, value in engine.full_parameters()}
    engine.close()
    reference = train_plainly(make_model, batches, world_size, loss_of)
    assert_same_training(reference, losses, got, tolerance("fp32", len(batches), optimizer="sgd"), norms)
