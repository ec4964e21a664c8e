"""How each system trains the model in as little memory as it can. A maker imports its system itself, under the limit.

A maker takes the shape and a folder on disk, and returns `step(tokens) -> loss`. Each uses the means that its own
documentation gives for models larger than memory: construction that never holds the whole model where there is one,
recomputed blocks for all alike, AdamW with fp32 state.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side.shape import Shape
from side_by_side.systems import ADAMW
from side_by_side.workload import build
from torch import Tensor, nn

Step = Callable[[Tensor], float]


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor) -> float:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def ddp(shape: Shape, folder: Path) -> Step:
    """torch's DistributedDataParallel in fp32; gradients live in its buckets, and nowhere else."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(build(shape), gradient_as_bucket_view=True)
    return _plain_step(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))


def fsdp2(shape: Shape, folder: Path) -> Step:
    """torch's fully_shard on each block with CPUOffloadPolicy, computing in bf16; built on the meta device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        model = build(shape)
    arguments: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (torch.distributed.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    for block in model.blocks:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            mine: Tensor = param.to_local()  # type: ignore[attr-defined]
            mine.normal_(std=0.02) if param.dim() > 1 else mine.fill_(float(name.endswith("weight")))
    return _plain_step(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))


def deepspeed(shape: Shape, folder: Path, *, tier: str) -> Step:
    """ZeRO stage 3 with optimizer and parameters offloaded, built under zero.Init; torch's Adam on CPU accelerators,
    as its own has to be compiled first and differs in speed, not in memory."""
    ds: Any = importlib.import_module("deepspeed")
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in ADAMW.items()}
    offload: dict[str, Any] = {"device": tier, "pin_memory": False}
    if tier == "nvme":
        offload["nvme_path"] = str(folder)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "offload_param": offload,
            "stage3_max_live_parameters": 2**24,
            "stage3_max_reuse_distance": 2**24,
            "stage3_prefetch_bucket_size": 2**22,
            "reduce_bucket_size": 2**22,
            "sub_group_size": 2**24,
        },
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {**settings, "torch_adam": True}},
        "bf16": {"enabled": True},
    }
    with ds.zero.Init(config_dict_or_path=config):
        model = build(shape)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: Tensor) -> float:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def trilithon(shape: Shape, folder: Path, *, tier: str) -> Step:
    """Stage 3 in bf16 with everything on one tier: "device" (which is this memory, on a machine without accelerators),
    "host" or "disk"."""
    from trilithon import initialize, zero

    on_disk = {"path": str(folder)} if tier == "disk" else {}
    offload = {"state": tier, "parameters": tier, "sub_group_numel": 2**20, "buffers": 3, **on_disk}
    config: dict[str, Any] = {
        "batch": {"micro_size": shape.micro_batch},
        "precision": "bf16",
        "zero": {"stage": 3, "unit_classes": ["Block"]},
        "offload": offload if tier != "device" else {},
        "optimizer": {"kind": "adamw", **ADAMW},
    }
    with zero.init(open_numel=2**22, **on_disk):
        model = build(shape)
    engine = initialize(model, config)
    return lambda tokens: engine.train_step([(tokens,)])


MAKERS: dict[str, Callable[[Shape, Path], Step]] = {
    "ddp": ddp,
    "fsdp2-offload": fsdp2,
    "deepspeed-3-cpu": lambda shape, folder: deepspeed(shape, folder, tier="cpu"),
    "deepspeed-3-nvme": lambda shape, folder: deepspeed(shape, folder, tier="nvme"),
    "trilithon-3": lambda shape, folder: trilithon(shape, folder, tier="device"),
    "trilithon-3-host": lambda shape, folder: trilithon(shape, folder, tier="host"),
    "trilithon-3-disk": lambda shape, folder: trilithon(shape, folder, tier="disk"),
}


def join(rank: int, world_size: int, port: int) -> None:
    """One gloo process group over the loopback device, described by the environment as torchrun does."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu",
    )  # fmt: skip
    torch.distributed.init_process_group("gloo")
