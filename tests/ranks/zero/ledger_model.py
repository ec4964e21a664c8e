"""The model whose bytes are counted, and the plain arithmetic of what a step sends."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trilithon.engine.engine import Engine
from trilithon.testing.models import TinyGPT


class RecomputedGPT(TinyGPT):
    """Each block's activations are computed again in backward."""

    def __init__(self, *, reentrant: bool, **options: Any) -> None:
        super().__init__(**options)
        self.reentrant = reentrant

    def forward(self, tokens_BT: Tensor) -> Tensor:
        targets, tokens_BT = tokens_BT[:, 1:], tokens_BT[:, :-1]
        x_BTD = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = checkpoint(block, x_BTD, use_reentrant=self.reentrant)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets.flatten())


def make(kind: str) -> nn.Module:
    sizes = {"dim": 16, "layers": 3, "context": 8}
    if kind == "frozen":
        return TinyGPT(frozen=True, unused=True, **sizes)
    if kind in ("reentrant", "saved-tensor hooks"):
        return RecomputedGPT(reentrant=kind == "reentrant", **sizes)
    return TinyGPT(**sizes)


def padded(engine: Engine) -> dict[str, int]:
    """Elements of each unit's flat buffer, padding included: what collectives move."""
    return {unit.name: unit.layout.padded for unit in engine._sharding.units}


def trainable(engine: Engine) -> int:
    return sum(unit.layout.padded for unit in engine._sharding.units if unit.trainable)


def sent_by_group(engine: Engine) -> dict[str, int]:
    """Bytes sent so far by group: "gather" and "reduce" move the model, "control" agrees on numbers."""
    return {group: engine.ledger.sent_bytes(group=group) for group in ("gather", "reduce", "control")}


def ring(elements: int, itemsize: int, world_size: int) -> int:
    """(W - 1) / W of a flat buffer, which divides evenly: padding sees to that."""
    assert elements % world_size == 0
    return elements // world_size * (world_size - 1) * itemsize
