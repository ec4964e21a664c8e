"""What is trained over the slow link: the same model and data, by our rules and by torch's DDP with its hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import trilithon
from trilithon.models import GPT, GPTConfig

LR = 1e-3
WARM = 3  # uncompressed steps before anything is timed
# name -> (what it is compared with, configuration of the optimizer)
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {"kind": "adamw", "lr": LR}),
    "lamb": ("lamb", {"kind": "lamb", "lr": LR}),
    "onebit_adam": ("adamw", {"kind": "onebit_adam", "lr": LR, "freeze_step": WARM}),
    "onebit_lamb": ("lamb", {"kind": "onebit_lamb", "lr": LR, "freeze_step": WARM}),
    "zero_one_adam": (
        "adamw",
        {"kind": "zero_one_adam", "lr": LR, "var_freeze_step": WARM, "local_step_scaler": 1, "local_step_clipper": 4},
    ),
    "apmsqueeze-quant8": ("adamw", {"kind": "apmsqueeze", "lr": LR, "freeze_step": WARM, "compressor": "quant"}),
    "apmsqueeze-quant4": (
        "adamw",
        {"kind": "apmsqueeze", "lr": LR, "freeze_step": WARM, "compressor": {"kind": "quant", "bits": 4}},
    ),
    "apmsqueeze-topk1%": (
        "adamw",
        {"kind": "apmsqueeze", "lr": LR, "freeze_step": WARM, "compressor": {"kind": "topk", "ratio": 0.01}},
    ),
}
HOOKS = ("ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd")
NAMES = (*OURS, *HOOKS)


def parent_of(name: str) -> str:
    """The system whose time a ratio is taken against."""
    return OURS[name][0] if name in OURS else "adamw"


def rule_of(name: str, freeze_step: int) -> dict[str, Any]:
    """The optimizer section of one of ours, with this length of warm-up where it has one."""
    section = dict(OURS[name][1])
    for key in ("freeze_step", "var_freeze_step"):
        if key in section:
            section[key] = freeze_step
    return section


class Trainer:
    """One system: `step(tokens)` makes one optimizer step and returns the loss; `ledger()` what it counted itself."""

    def __init__(self, step: Callable[[Tensor], float], ledger: Callable[[], int | None], close: Callable[[], None]):
        self.step, self.ledger, self.close = step, ledger, close


def make(name: str, shape: GPTConfig, rows: int, section: dict[str, Any] | None = None) -> Trainer:
    """Collective. section: instead of the usual optimizer section of one of ours."""
    torch.manual_seed(0)
    model = GPT(shape)
    if name not in OURS:
        return _ddp(name, model)
    config = {
        "optimizer": section or OURS[name][1],
        "batch": {"global_size": rows * dist.get_world_size()},
        "comm": {"shared_memory": False},  # the hosts are one machine, and must not notice
    }
    engine = trilithon.initialize(model, config)

    def step(tokens: Tensor) -> float:
        return engine.train_step([tokens], _loss)

    return Trainer(step, engine.ledger.sent_bytes, engine.close)


def _loss(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


def _ddp(name: str, model: nn.Module) -> Trainer:
    wrapped = DistributedDataParallel(model)
    if name == "ddp-fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "ddp-bf16":
        # under its own name torch registers this hook for GPUs only, though gloo adds bf16 as well
        hook = default_hooks.bf16_compress_hook
        wrapped.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # noqa: PLW0108
    elif name == "ddp-powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(tokens: Tensor) -> float:
        optimizer.zero_grad()
        loss = _loss(wrapped, tokens)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return Trainer(step, lambda: None, lambda: None)
