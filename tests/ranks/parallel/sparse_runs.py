"""A list of layers with experts among them, trained in stages by the engine and in one process by plain code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import trilithon
from trilithon import PipelineModule
from trilithon.parallel.moe import ConvertedBlock, FeedForward, MoE
from trilithon.testing.moe_reference import PlainMoE

WIDTH, INNER, EXPERTS = 8, 12, 4
BALANCE, Z_LOSS, CLIP = 0.1, 0.01, 0.05
ADAM = {"kind": "adam", "lr": 1e-2, "eps": 1e-6}
MICROS, ROWS, STEPS = 2, 12, 3

Batches = list[tuple[Tensor, Tensor]]


class Sparse(nn.Module):
    """Experts around which the input is carried along; their losses join backward by themselves."""

    def __init__(self, ep_size: int | None, **moe: Any) -> None:
        super().__init__()
        layer = MoE(WIDTH, FeedForward(WIDTH, INNER), EXPERTS, ep_size, z_loss_coeff=Z_LOSS, **moe)
        self.block = ConvertedBlock(layer, BALANCE)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.block(x)
        return out


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().sum() / max(output.numel(), 1)


def make(ep_sizes: Sequence[int | None] = (2, 2), *, dense_first: bool = False, **moe: Any) -> PipelineModule:
    """Two layers of experts, one for each of two stages; or both on the second one, behind a first without any."""
    torch.manual_seed(0)
    sparse = [Sparse(size, **moe) for size in ep_sizes]
    dense = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    layers = [dense[0], nn.Tanh(), sparse[0], dense[1], sparse[1], dense[2]]
    if dense_first:
        layers = [dense[0], nn.Tanh(), dense[1], sparse[0], sparse[1], dense[2]]
    return PipelineModule(layers, loss_fn=loss_fn, partition_method="uniform")


def batches_of(steps: int = STEPS, micros: int = MICROS, rows: int = ROWS) -> list[Batches]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, micros, 2, rows, WIDTH, generator=generator)
    return [[(x[s, m, 0], x[s, m, 1]) for m in range(micros)] for s in range(steps)]


def config_of(mesh: dict[str, int], stage: int = 1, **more: Any) -> dict[str, Any]:
    batch = {"micro_size": ROWS // 2, "accumulation": MICROS}
    return {"mesh": mesh, "zero": {"stage": stage}, "optimizer": ADAM, "clip_norm": CLIP, "batch": batch, **more}


def own(engine: trilithon.Engine, batches: Batches, sizes: Sequence[int] | None = None) -> Batches:
    """This rank's rows: equal parts, or as many as `sizes` says."""
    rank, parts = engine.mesh.part(("data", "sequence"))
    each = list(sizes) if sizes is not None else [ROWS // parts] * parts
    return [(x.split(each)[rank], y.split(each)[rank]) for x, y in batches]


def train(
    mesh: dict[str, int], stage: int = 1, ep_sizes: Sequence[int | None] = (2, 2), *, dense_first: bool = False,
    more: dict[str, Any] | None = None, sizes: Sequence[int] | None = None, **moe: Any,
) -> tuple[list[float], list[float], dict[str, Tensor]]:  # fmt: skip
    """(losses, norms, parameters) of three steps."""
    model = make(ep_sizes, dense_first=dense_first, **moe)
    with trilithon.initialize(model, config_of(mesh, stage, **(more or {}))) as engine:
        torch.manual_seed(5)
        losses, norms = [], []
        for batches in batches_of():
            losses.append(engine.train_step(own(engine, batches, sizes)))
            norms.append(engine.grad_norm)
        return losses, norms, {name: value.clone() for name, value in engine.full_parameters()}


class PlainSparse(nn.Module):
    """`Sparse` with experts that are modules of their own, and its losses beside its output."""

    def __init__(self, sparse: Sparse, capacity_factor: float | None) -> None:
        super().__init__()
        moe, blocks = sparse.block.moe, []
        stacked = dict(moe.experts.named_parameters())
        for index in range(EXPERTS):
            block = FeedForward(WIDTH, INNER)
            block.load_state_dict({name: value[index] for name, value in stacked.items()})
            blocks.append(block)
        self.moe = PlainMoE(moe.gate.weight, blocks, moe.k, capacity_factor=capacity_factor, min_capacity=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, balance, *_ = self.moe(x)
        z = (x @ self.moe.gate.t()).logsumexp(1).square().mean()
        return x + y, BALANCE * (balance + Z_LOSS * z)


class Alone:
    """The reference: one process, the part of every rank by itself, one layer after the other, torch's Adam."""

    def __init__(self, model: PipelineModule, capacity_factor: float | None, sizes: Sequence[int]) -> None:
        layers = [child for _, child in sorted(model.named_children(), key=lambda item: int(item[0]))]
        self.layers = nn.ModuleList(PlainSparse(x, capacity_factor) if isinstance(x, Sparse) else x for x in layers)
        update = torch.optim.Adam(self.layers.parameters(), lr=ADAM["lr"], eps=ADAM["eps"])
        self.losses: list[float] = []
        self.norms: list[float] = []
        for batches in batches_of():
            total = 0.0
            for x, labels in batches:
                for part, wanted in zip(x.split(list(sizes)), labels.split(list(sizes))):
                    loss, balance = self.losses_of(part, wanted)
                    share = len(batches) * len(sizes)
                    ((loss + balance) / share).backward()
                    total += loss.item() / share
            self.losses.append(total)
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.layers.parameters(), CLIP)))
            update.step()
            update.zero_grad()

    def losses_of(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of one part, which is what the engine reports, and those of its layers of experts."""
        balance = x.new_zeros(())
        for layer in self.layers:
            if isinstance(layer, PlainSparse):
                x, here = layer(x)
                balance = balance + here
            else:
                x = layer(x)
        return loss_fn(x, labels), balance

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Under the engine's names, experts stacked."""
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, PlainSparse):
                found |= {f"{index}.{name}": value.detach() for name, value in layer.named_parameters()}
                continue
            found[f"{index}.block.moe.gate.weight"] = layer.moe.gate.detach()
            for name, _ in layer.moe.experts[0].named_parameters():
                values = [expert.get_parameter(name).detach() for expert in layer.moe.experts]
                found[f"{index}.block.moe.experts.{name}"] = torch.stack(values)
        return found
