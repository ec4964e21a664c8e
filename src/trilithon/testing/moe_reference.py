"""Mixtures of experts in the plainest code that could be right: dense masks, one process, no tables.

`PlainMoE` computes what `trilithon.MoE` computes, from its definition: for each token, E x C ones and zeros say where
it goes (Lepikhin et al. 2020, arXiv:2006.16668, algorithm 1). `chunk_losses` is the loop that several ranks have to
equal: each rank routes its own part of the batch, so the parts are routed one after the other, never together.
"""

# S tokens, E experts, K choices per token, M width, C slots per expert

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class PlainMoE(nn.Module):
    """experts: modules [n, M] -> [n, M]; gate: [E, M]. Returns (y, balance loss, routed [E], kept [E]).

    Dropping is by position (choice-major) or by probability; nothing is random.
    """

    def __init__(
        self, gate: Tensor, experts: Sequence[nn.Module], k: int, *, capacity_factor: float | None, min_capacity: int,
        policy: str = "position", normalise: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate = nn.Parameter(gate.detach().clone())
        self.experts = nn.ModuleList(experts)
        self.k, self.factor, self.minimum, self.policy, self.normalise = (
            k, capacity_factor, min_capacity, policy, normalise,
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, list[int], list[int]]:
        x_SM = x.reshape(-1, x.shape[-1])
        num_tokens, num_experts = len(x_SM), len(self.experts)
        probs = torch.softmax(x_SM @ self.gate.t().to(x_SM.dtype), dim=-1)
        order = [sorted(range(num_experts), key=lambda e, s=s: (-probs[s, e].item(), e)) for s in range(num_tokens)]  # type: ignore[misc]
        choices = [row[: self.k] for row in order]
        capacity = num_tokens
        if self.factor is not None:
            wanted = math.ceil(round(self.k * self.factor * num_tokens / num_experts, 9))
            capacity = min(num_tokens, max(self.minimum, wanted))
        mask = x_SM.new_zeros(num_tokens, num_experts, capacity)
        routed, kept = [0] * num_experts, [0] * num_experts
        for e in range(num_experts):
            takers = [(j, s) for j in range(self.k) for s in range(num_tokens) if choices[s][j] == e]
            routed[e] = len(takers)
            if self.policy == "probs":
                takers.sort(key=lambda item: -probs[item[1], e].item())  # stable: choice-major among equals
            takers = takers[:capacity]
            kept[e] = len(takers)
            for slot, s in enumerate(sorted(s for _, s in takers)):
                mask[s, e, slot] = 1.0
        chosen = mask.sum(2)  # [S, E] ones where a choice was kept
        weights = probs * chosen
        if self.k > 1 and self.normalise:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
        inputs = torch.einsum("sec,sm->ecm", mask, x_SM)
        outputs = torch.stack([expert(inputs[e]) for e, expert in enumerate(self.experts)])
        y = torch.einsum("sec,se,ecm->sm", mask, weights, outputs)
        share = x_SM.new_tensor(routed) / max(num_tokens, 1)
        balance = num_experts / self.k * (share * probs.sum(0) / max(num_tokens, 1)).sum()
        return y.view(x.shape), balance, routed, kept


def chunk_losses(loss_of: Callable[[Tensor], Tensor], batch: Tensor, world_size: int) -> Tensor:
    """The mean over ranks of the loss of each rank's part of `batch` (its rows, in order), in one process."""
    parts = batch.chunk(world_size)
    return sum((loss_of(part) for part in parts), start=batch.new_zeros(())) / len(parts)
