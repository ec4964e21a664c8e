"""The models of the golden checkpoints with experts and of pipelines, for DeepSpeed and for the tests that read them.

Both start from values that a name determines, so that whoever builds them, on however many ranks, begins alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, INNER, EXPERTS, VOCABULARY, ROWS = 4, 6, 4, 11, 8
STEPS_SAVED, STEPS_AFTER, MICRO_BATCHES = 3, 2, 2
BALANCE = 0.01  # weight of the balance loss


def value_of(name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The initial values of one parameter."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator) * 0.5


def batch(step: int, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank, step and micro-batch, [ROWS] each."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    drawn = torch.randint(0, VOCABULARY, (2, ROWS), generator=generator)
    return drawn[0], drawn[1]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class ExpertsModel(nn.Module):
    """layers: makes each mixture of experts; returns (output, balance loss, counts)."""

    def __init__(self, layers: list[Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.moes = nn.ModuleList(make() for make in layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, balance = self.body(self.embed(tokens)), 0.0
        for layer in self.moes:
            mixed, one, _ = layer(hidden)
            hidden, balance = hidden + mixed, balance + one
        loss = nn.functional.cross_entropy(self.head(hidden).float(), targets)
        return loss + BALANCE * balance


# ------------------------------------------------------------------------------------------------------------ pipelines
class Embed(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)


def project(layer: nn.Module, hidden: Tensor) -> Tensor:
    """The tied head: logits by the embedding's own weight."""
    return nn.functional.linear(hidden, layer.weight)


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.linspace(0, 1, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(self.norm(hidden)).tanh() + self.offset.to(hidden.dtype)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), targets)


class Straight(nn.Module):
    """The pipeline's layers on one process: each under its number, a tied one under the first of its numbers."""

    def __init__(self, layers: int, *, tied: bool) -> None:
        super().__init__()
        self.tied, self.count = tied, layers
        self.add_module("0", Embed())
        for index in range(1, layers + 1):
            self.add_module(str(index), Middle())
        if not tied:
            self.add_module(str(layers + 1), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        embed = self.get_submodule("0")
        hidden = embed(tokens)
        for index in range(1, self.count + 1):
            hidden = self.get_submodule(str(index))(hidden)
        logits = project(embed, hidden) if self.tied else self.get_submodule(str(self.count + 1))(hidden)
        return loss_of(logits, targets)
