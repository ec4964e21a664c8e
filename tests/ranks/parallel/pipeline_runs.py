"""One model as a list of layers, trained in stages by the engine and in one process by plain code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trilithon
from trilithon import LayerSpec, PipelineModule, TiedLayerSpec
from trilithon.parallel import Dropout
from trilithon.parallel.pipeline.seeds import layer_seed
from trilithon.testing.parity import rank_part

VOCABULARY, WIDTH, TOKENS = 29, 16, 6
SEED = 5
ADAMW = {"kind": "adamw", "lr": 3e-3, "weight_decay": 0.1}


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)


class Mix(nn.Module):
    """A block with dropout that also passes a mask on, which no gradient goes through."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.dropout = Dropout(p)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = pair
        return x + mask[..., None] * self.dropout(self.down(F.gelu(self.up(self.norm(x))))), mask


def with_mask(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.detach()[..., 0] > -1.0


def first_of(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0]


def to_logits(embed: nn.Module, x: Tensor) -> Tensor:
    return x @ embed.tokens.weight.T


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layer_list(dropout: float = 0.1, blocks: int = 3) -> list[Any]:
    return [
        TiedLayerSpec("embed", Embed, tied_weight_attr="tokens.weight"),
        Dropout(dropout),
        with_mask,
        *(LayerSpec(Mix, dropout) for _ in range(blocks)),
        first_of,
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embed", Embed, forward_fn=to_logits, tied_weight_attr="tokens.weight"),
    ]


def make(num_stages: int | None = None, **more: Any) -> PipelineModule:
    torch.manual_seed(SEED)
    return PipelineModule(layer_list(), num_stages=num_stages, loss_fn=loss_fn, **more)


def batches_of(steps: int, micros: int, rows: int) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(3)
    whole = torch.randint(VOCABULARY, (steps, micros, rows, TOKENS + 1), generator=generator)
    return [[(whole[s, m, :, :-1], whole[s, m, :, 1:]) for m in range(micros)] for s in range(steps)]


class Alone:
    """The reference: one process, one layer after the other, gradients added up over micro-batches."""

    def __init__(self, steps: Sequence[Sequence[tuple[Tensor, Tensor]]], clip_norm: float = 0.0) -> None:
        model = make()
        torch.manual_seed(SEED)
        update = torch.optim.AdamW(model.parameters(), lr=ADAMW["lr"], weight_decay=ADAMW["weight_decay"])
        self.losses: list[float] = []
        self.norms: list[float] = []
        for batches in steps:
            draw, total = int(torch.randint(2**62, ())), 0.0
            kept = torch.get_rng_state()
            for micro, (x, labels) in enumerate(batches):
                loss = loss_fn(self.through(model, x, draw, micro), labels) / len(batches)
                loss.backward()
                total += loss.item()
            torch.set_rng_state(kept)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or 1e9)
            update.step()
            update.zero_grad()
            self.losses.append(total)
            self.norms.append(float(norm))
        self.parameters = {name: param.detach() for name, param in model.named_parameters()}

    @staticmethod
    def through(model: PipelineModule, x: Any, draw: int, micro: int) -> Any:
        for index, layer in enumerate(model.pipeline_layers()):
            torch.manual_seed(layer_seed(draw, micro, index))
            x = layer.run(x)
        return x


def parts_of(engine: trilithon.Engine, batches: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, ...]]:
    return [rank_part(batch, engine.mesh.data_rank, engine.mesh.data_size) for batch in batches]


def settings(micros: int, rows: int, **more: Any) -> dict[str, Any]:
    return {"batch": {"global_size": rows * micros, "accumulation": micros}, "optimizer": ADAMW, **more}


def train(
    config: dict[str, Any], steps: Sequence[Sequence[tuple[Tensor, Tensor]]],
    make_model: Callable[[], nn.Module] = make,
) -> tuple[list[float], list[float], dict[str, Tensor]]:  # fmt: skip
    """(losses, norms, parameters) of the engine."""
    with trilithon.initialize(make_model(), config) as engine:
        torch.manual_seed(SEED)
        losses, norms = [], []
        for batches in steps:
            losses.append(engine.train_step(parts_of(engine, batches)))
            norms.append(engine.grad_norm)
        return losses, norms, dict(engine.full_parameters())
