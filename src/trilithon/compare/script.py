"""The user's script: a Python file that says what to build and what to feed.

def build() -> nn.Module: ...                       # the same weights every time, given torch's seed
def batches(rank, world_size) -> Iterator: ...      # this rank's micro-batches
def loss(model, batch) -> Tensor: ...               # optional; default: what model(batch) returns
def optimizer(params) -> torch.optim.Optimizer: ... # optional; default: from the configuration
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trilithon.errors import ConfigError, DataError

Loss = Callable[[Callable[..., Any], Any], Tensor]


@dataclass(frozen=True, slots=True)
class Script:
    """What a script defines."""

    path: Path
    build: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[Any]]
    loss: Loss
    optimizer: Callable[[Any], torch.optim.Optimizer] | None

    @classmethod
    def load(cls, path: Path) -> Script:
        """Run the file and take its functions. Raises ConfigError if it does not define what is needed."""
        names = runpy.run_path(str(path), run_name="__compare__")
        missing = [name for name in ("build", "batches") if not callable(names.get(name))]
        if missing:
            raise ConfigError(
                f"{path} does not define {' and '.join(missing)}. It needs build() -> nn.Module and "
                "batches(rank, world_size) -> iterator of batches."
            )
        return cls(path, names["build"], names["batches"], names.get("loss", _default_loss), names.get("optimizer"))

    def model(self, seed: int) -> nn.Module:
        """A new model in training mode. Raises ConfigError if it draws random numbers in forward."""
        torch.manual_seed(seed)
        model = self.build()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"build() of {self.path} returned {type(model).__name__}, not an nn.Module.")
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise ConfigError(
                    f"{name} is dropout with p={module.p}: its random numbers differ between one process and several "
                    "ranks, so nothing could be compared. Let build() use p=0."
                )
        return model.train()

    def feed(self, rank: int, world_size: int) -> Iterator[Any]:
        """This rank's batches; the end of them is a DataError that says how many there were."""
        count = 0
        for batch in self.batches(rank, world_size):
            yield batch
            count += 1
        raise DataError(
            f"batches({rank}, {world_size}) of {self.path} ended after {count} batches. Yield more, or lower --steps."
        )


def _default_loss(model: Callable[..., Any], batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        result = model(**batch)
    elif isinstance(batch, (tuple, list)):
        result = model(*batch)
    else:
        result = model(batch)
    if not isinstance(result, Tensor):
        result = result["loss"] if isinstance(result, Mapping) and "loss" in result else getattr(result, "loss", result)
    if not isinstance(result, Tensor) or result.numel() != 1:
        shape = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(f"the model returned {shape}, not a loss. Define loss(model, batch) in the script.")
    return result
