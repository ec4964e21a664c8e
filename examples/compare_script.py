"""What `trilithon compare` needs of a script: what to build, and what to feed.

    trilithon compare plain config.json --script examples/compare_script.py --nproc 2

where config.json is, say, {"zero": {"stage": 3}, "optimizer": {"kind": "adamw", "lr": 1e-3}}.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES, HIDDEN, CLASSES, BATCH = 16, 32, 4, 8


def build() -> nn.Module:
    """Called once per side, after torch's seed was set: every side starts from the same weights."""
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN),
        nn.GELU(),
        nn.LayerNorm(HIDDEN),
        nn.Linear(HIDDEN, CLASSES),
    )


def batches(rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches; they must depend on the arguments only."""
    generator = torch.Generator().manual_seed(1 + rank)
    while True:
        inputs = torch.randn(BATCH, FEATURES, generator=generator)
        yield inputs, inputs[:, :CLASSES].argmax(dim=1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Optional: without it, model(*batch) has to return the loss itself."""
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)
