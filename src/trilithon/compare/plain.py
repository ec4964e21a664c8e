"""The reference: ordinary PyTorch in one process, in the precision the model is built in.

It takes the batches of every rank in turn, averages their losses, clips by the whole norm and lets a torch optimizer
step: the plainest code that data-parallel training has to agree with.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import nn

from trilithon.compare.record import StepRecord
from trilithon.compare.script import Script
from trilithon.config import Config
from trilithon.errors import ConfigError


class PlainSide:
    """`like` is the configuration of the other side: its accumulation, update rule and clipping are imitated."""

    def __init__(self, script: Script, model: nn.Module, like: Config, nproc: int) -> None:
        self._loss = script.loss
        self._model = model
        self._clip_norm = like.clip_norm
        self._accumulation = like.batch.resolve(nproc).accumulation
        self._feeds = [script.feed(rank, nproc) for rank in range(nproc)]
        if script.optimizer is not None:
            self._optimizer = script.optimizer(model.parameters())
        else:
            self._optimizer = torch_optimizer(model, like)

    def step(self, rates: list[float] | None) -> StepRecord:
        """One update. `rates` replaces the learning rate of each parameter group."""
        micro_batches = self._accumulation * len(self._feeds)
        total = 0.0
        self._optimizer.zero_grad()
        for feed in self._feeds:
            for batch in islice(feed, self._accumulation):
                loss = self._loss(self._model, batch)
                (loss / micro_batches).backward()
                total += float(loss.detach())
        named = dict(self._model.named_parameters())
        gradients = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().float().clone()
            for name, p in named.items()
            if p.requires_grad
        }
        if self._clip_norm > 0:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        for group, rate in zip(self._optimizer.param_groups, rates or (), strict=rates is not None):
            group["lr"] = rate
        used = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._optimizer.step()
        parameters = {name: p.detach().float().clone() for name, p in named.items()}
        return StepRecord(total / micro_batches, True, used, gradients, parameters)


def torch_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """torch's own optimizer with the settings of `config.optimizer`. Raises ConfigError where torch has none."""
    chosen = config.optimizer
    settings: dict[str, Any] = {} if chosen is None else chosen.model_dump(exclude={"kind"})
    kind = None if chosen is None else chosen.kind
    classes: dict[str, type[torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
    }
    if kind not in classes or not settings.pop("bias_correction", True):
        what = (
            "no optimizer" if kind is None else f"optimizer {kind}" + (" without bias correction" * (kind in classes))
        )
        raise ConfigError(
            f"the configuration has {what}, which plain PyTorch cannot imitate. Define optimizer(params) in the "
            f"script, or configure one of {', '.join(sorted(classes))}."
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return classes[kind](trained, **settings)
