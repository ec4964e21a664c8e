"""The references: plain PyTorch in one process, written from what the clients document and knowing no engine.

A training is a list of updates; an update is the list of the micro-batches that all ranks see in it, and its gradient
is the mean over them. Rates are functions of the number of the update, written out from the schedules' formulas.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

LossOf = Callable[[nn.Module, Tensor], Tensor]
Rates = Callable[[int], float]
Update = Sequence[Tensor]


@dataclass
class Plain:
    """What happened at every update; norms are those before clipping."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def linear_decay(rate: float, total: int) -> Rates:
    """transformers' "linear" without warm-up: the rate falls to 0 over `total` updates."""
    return lambda update: rate * (1 - update / total)


def warmup_decay(rate: float, warmup: int, total: int) -> Rates:
    """DeepSpeed's WarmupDecayLR from 0: logarithmic warm-up, then linear; the first update uses the minimum."""
    warmup = max(2, warmup)

    def at(update: int) -> float:
        i = update - 1
        if i < 0:
            return 0.0
        if i < warmup:
            return rate * math.log(i + 1) / math.log(warmup)
        return rate * max(0.0, (total - i) / max(1, total - warmup))

    return at


def constant(rate: float) -> Rates:
    return lambda update: rate


def language_model_loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def train(
    model: nn.Module,
    updates: Sequence[Update],
    *,
    rates: Rates,
    loss_of: LossOf = language_model_loss,
    make: Callable[[list[nn.Parameter], float], torch.optim.Optimizer] | None = None,
    clip: float | None = 1.0,
    bf16: bool = False,
) -> Plain:
    """Train `model` in place (AdamW without decay, unless `make` says otherwise).

    With `bf16` a bf16 copy computes losses and gradients, and the values of `model` stay in fp32.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    make = make or (lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0))
    optimizer = make(trainable, rates(0))
    plain = Plain(model)
    for number, micro_batches in enumerate(updates):
        computing = copy.deepcopy(model).to(torch.bfloat16) if bf16 else model
        computing.train()
        total = 0.0
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter)
        for ids in micro_batches:
            computing.zero_grad() if bf16 else None
            loss = loss_of(computing, ids)
            (loss / len(micro_batches)).backward()
            total += loss.item() / len(micro_batches)
            if bf16:
                for parameter, other in zip(model.parameters(), computing.parameters(), strict=True):
                    if parameter.requires_grad and other.grad is not None:
                        assert parameter.grad is not None
                        parameter.grad += other.grad.float()
        norm = nn.utils.clip_grad_norm_(trainable, clip if clip is not None else math.inf)
        for group in optimizer.param_groups:
            group["lr"] = rates(number)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        plain.losses.append(total)
        plain.norms.append(norm.item())
        plain.rates.append(rates(number))
    return plain


@torch.no_grad()
def evaluate(model: nn.Module, batches: Update, loss_of: LossOf = language_model_loss, *, bf16: bool = False) -> float:
    """The mean loss over batches of equal size."""
    computing = copy.deepcopy(model).to(torch.bfloat16) if bf16 else model
    computing.eval()
    return sum(loss_of(computing, ids).item() for ids in batches) / len(batches)


def tokens_of(text: Path, model: Path, needed: int) -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return torch.tensor(tokenizer(text.read_text(encoding="utf-8"))["input_ids"][:needed])


def updates_of(
    text: Path, model: Path, count: int, parts: int, *, micro: int = 2, length: int = 32, first: int = 0
) -> list[Update]:
    """`count` updates of `parts` micro-batches (ranks times accumulation) in the order of the text."""
    blocks = count * parts * micro
    ids = tokens_of(text, model, (first + blocks) * length)[first * length :].view(count, parts, micro, length)
    return [list(update) for update in ids]


def load(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
