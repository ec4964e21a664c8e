"""How each system turns the model into a step. Runs in the rank's own process; a maker imports its system itself.

A maker takes `Rank` and returns `step(batches) -> mean loss of this rank`, where `batches` are the micro-batches of one
update. All of them use AdamW with the same settings, fused where torch has it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from side_by_side.catalogue import System
from side_by_side.shape import Shape
from side_by_side.workload import build

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}

Step = Callable[[Sequence[Tensor]], float]


@dataclass
class Rank:
    """What a maker is told, and what it may leave behind: `sent_bytes`, this rank's bytes so far by its own count."""

    system: System
    shape: Shape
    world_size: int
    sent_bytes: Callable[[], int] | None = None


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank, *, autocast: bool) -> Step:
    system = rank.system
    no_sync: Callable[[], Any] = getattr(model, "no_sync", contextlib.nullcontext)

    def backward(tokens: Tensor) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(tokens)
        (loss / system.accumulation).backward()
        return float(loss.detach())

    def step(batches: Sequence[Tensor]) -> float:
        with no_sync():
            losses = [backward(tokens) for tokens in batches[:-1]]
        losses.append(backward(batches[-1]))
        if system.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), system.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses) / len(losses)

    return step


def ddp(rank: Rank) -> Step:
    """torch's DistributedDataParallel; bf16 means autocast over fp32 parameters."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(build(rank.shape), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return _plain_step(model, optimizer, rank, autocast=rank.system.dtype == "bf16")


def zero_redundancy(rank: Rank) -> Step:
    """torch's ZeroRedundancyOptimizer under DDP: optimizer state cut over ranks by parameter."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(build(rank.shape), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **ADAMW
    )
    return _plain_step(model, optimizer, rank, autocast=rank.system.dtype == "bf16")


def fsdp2(rank: Rank) -> Step:
    """torch's fully_shard on each block and on the root; gradients are reduced in every micro-batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build(rank.shape)
    arguments: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (rank.world_size,)),
        "reshard_after_forward": rank.system.options["reshard"],
    }
    if rank.system.dtype == "bf16":
        low = torch.bfloat16
        arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return _plain_step(model, optimizer, rank, autocast=False)


def trilithon(rank: Rank) -> Step:
    """This library, through its public names only."""
    from trilithon import initialize, zero

    system = rank.system
    config = {
        "batch": {"micro_size": rank.shape.micro_batch, "accumulation": system.accumulation},
        "precision": system.dtype,
        "zero": system.options["zero"],
        "comm": system.options.get("comm", {}),
        "optimizer": {"kind": "adamw", **ADAMW},
        "clip_norm": system.clip_norm,
    }
    with zero.init(enabled=bool(system.options.get("init"))):
        model = build(rank.shape)
    engine = initialize(model, config)
    rank.sent_bytes = engine.ledger.sent_bytes

    def step(batches: Sequence[Tensor]) -> float:
        losses = []
        for tokens in batches:
            loss = engine(tokens)
            engine.backward(loss)
            losses.append(float(loss.detach()))
        engine.step()
        return sum(losses) / len(losses)

    return step


def deepspeed(rank: Rank) -> Step:
    """DeepSpeed, where it is installed. Clipping is always written out, as leaving it out does not mean none."""
    ds: Any = importlib.import_module("deepspeed")
    system, stage = rank.system, rank.system.options["stage"]
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in ADAMW.items()}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rank.shape.micro_batch,
        "gradient_accumulation_steps": system.accumulation,
        "gradient_clipping": system.clip_norm,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": settings},
        "bf16": {"enabled": system.dtype == "bf16"},
    }
    with ds.zero.Init(config_dict_or_path=config) if stage == 3 else contextlib.nullcontext():
        model = build(rank.shape)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batches: Sequence[Tensor]) -> float:
        losses = []
        for tokens in batches:
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return sum(losses) / len(losses)

    return step


MAKERS: dict[str, Callable[[Rank], Step]] = {
    "ddp": ddp,
    "zero_redundancy": zero_redundancy,
    "fsdp2": fsdp2,
    "trilithon": trilithon,
    "deepspeed": deepspeed,
}


def join(rank: int, world_size: int, port: int) -> None:
    """One gloo process group over the loopback device, described by the environment as torchrun does."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu",
    )  # fmt: skip
    torch.distributed.init_process_group("gloo")
