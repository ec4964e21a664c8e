"""A small model with dense layers around a layer of experts, and the one-process loop that ranks have to equal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trilithon.parallel.moe import MoE
from trilithon.testing.moe_reference import PlainMoE, chunk_losses

WIDTH, INNER, EXPERTS = 8, 12, 4
COEFFICIENT = 0.1
EPS = 1e-6  # Adam divides by it where gradients are tiny: 1e-8 would turn rounding of 1e-18 into 1e-10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return out


class Mixed(nn.Module):
    """Dense layers, one or two layers of experts; calling it gives the loss, mean squared output plus balance."""

    def __init__(self, *, ep_sizes: tuple[int | None, ...] = (1,), dtype: torch.dtype = torch.float64, **moe: Any):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moes = nn.ModuleList(MoE(WIDTH, Block(), EXPERTS, ep_size=size, **moe) for size in ep_sizes)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        balance = x.new_zeros(())
        for moe in self.moes:
            change, here, _ = moe(x)
            x, balance = x + change, balance + here
        return self.last(x).square().mean() + COEFFICIENT * balance if x.numel() else self.last(x).sum() + 0 * balance


class PlainMixed(nn.Module):
    """The same weights with `PlainMoE`, whose experts are modules of their own."""

    def __init__(self, model: Mixed, **plain: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.load_state_dict(model.first.state_dict())
        self.last.load_state_dict(model.last.state_dict())
        self.moes = nn.ModuleList()
        for moe in model.moes:
            stacked = dict(moe.experts.named_parameters())
            blocks = []
            for g in range(EXPERTS):
                block = Block()
                block.load_state_dict({name: value[g] for name, value in stacked.items()})
                blocks.append(block)
            self.moes.append(PlainMoE(moe.gate.weight, blocks, moe.k, **plain))
        self.to(model.first.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        balance = x.new_zeros(())
        for moe in self.moes:
            change, here, *_ = moe(x)
            x, balance = x + change, balance + here
        return self.last(x).square().mean() + COEFFICIENT * balance

    def stacked(self, value_of: Any) -> dict[str, Tensor]:
        """value_of(parameter) under the names of `Mixed`, experts stacked."""
        found = {}
        for name, param in self.named_parameters():
            if ".experts." not in name:
                found[name.replace(".gate", ".gate.weight") if name.endswith(".gate") else name] = value_of(param)
        for i, moe in enumerate(self.moes):
            for own, _ in moe.experts[0].named_parameters():
                values = [value_of(block.get_parameter(own)) for block in moe.experts]
                found[f"moes.{i}.experts.{own}"] = torch.stack(values)
        return found


def batches(steps: int, rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for _ in range(steps)]


def train_reference(
    model: PlainMixed, data: list[Tensor], world_size: int, lr: float, clip: float = 0.0
) -> dict[str, Any]:
    """One process, chunk by chunk, torch's Adam: losses, norms, gradients of the last step, parameters, moments.

    The norm and the factor that clips are fp32 numbers, as the engine's are.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, eps=EPS)
    losses, norms = [], []
    for batch in data:
        optimizer.zero_grad()
        loss = chunk_losses(model, batch, world_size)
        loss.backward()
        losses.append(loss.item())
        squares = sum(p.grad.double().square().sum().item() for p in model.parameters())
        norms.append(float(np.float32(math.sqrt(squares))))
        gradients = model.stacked(lambda p: p.grad.clone())
        if clip:
            for param in model.parameters():
                param.grad.mul_(min(1.0, float(np.float32(clip) * (np.float32(1) / np.float32(norms[-1] + 1e-6)))))
        optimizer.step()
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "parameters": model.stacked(lambda p: p.detach().clone()),
        "exp_avg": model.stacked(lambda p: optimizer.state[p]["exp_avg"].clone()),
    }
