"""What keeps experts evenly loaded: the auxiliary losses of the router.

With f_e the share of tokens that chose expert e (before any is dropped) and P_e its mean probability, the load-balance
loss is E / K * sum_e f_e P_e: 1 when the load is uniform. Gradients flow through P only. (Lepikhin et al. 2020,
arXiv:2006.16668, section 2.2; Fedus et al. 2021, arXiv:2101.03961, section 2.2; the z-loss: Zoph et al. 2022,
arXiv:2202.08906, section 3.)
"""

# S tokens, E experts, K choices per token, B sequences

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Scope = Literal["local", "sequence", "global"]
Counts = Literal["all", "first"]


def balance_loss(
    probs: Tensor, experts: Tensor, used: Tensor | None, *, counts: Counts = "all",
    num_sequences: int = 1, total: Callable[[Tensor], tuple[Tensor, int]] | None = None,
) -> Tensor:  # fmt: skip
    """probs: [S, E]; experts: [S, K] choices; used: [S] bool, tokens that are not padding. -> [] .

    counts: "first" counts first choices only (and K as 1). num_sequences: the mean over so many equal parts of the
    tokens, each balanced by itself. total: sums a vector over ranks and tells over how many; the mean over ranks of
    what each returns is then the loss over all tokens, however unevenly they are spread.
    """
    num_tokens, num_experts = probs.shape
    picked = experts if counts == "all" else experts[:, :1]
    k = max(picked.shape[1], 1)
    if num_tokens == 0 and total is None:
        return probs.sum()
    weight = probs.new_ones(num_tokens) if used is None else used.to(probs.dtype)
    length = num_tokens // num_sequences
    group = torch.arange(num_tokens, device=probs.device).div(max(length, 1), rounding_mode="floor")
    places = (group.unsqueeze(1) * num_experts + picked).reshape(-1)
    chosen = probs.new_zeros(num_sequences * num_experts).index_add_(
        0, places, weight.detach().repeat_interleave(k) if k > 1 else weight.detach()
    ).view(num_sequences, num_experts)  # fmt: skip
    sizes = weight.view(num_sequences, -1).sum(1) if num_tokens else probs.new_zeros(num_sequences)
    mass = (probs * weight.unsqueeze(1)).view(num_sequences, length, num_experts).sum(1)
    if total is None:
        safe = sizes.clamp(min=1)
        return (num_experts / k) * (chosen / safe.unsqueeze(1) * (mass / safe.unsqueeze(1))).sum() / num_sequences
    summed, ranks = total(torch.cat((chosen.sum(0), sizes.sum().reshape(1))))
    everyone = summed[-1].clamp(min=1)
    return (num_experts / k) * (summed[:-1] / everyone * (mass.sum(0) * ranks / everyone)).sum()


def z_loss(logits: Tensor, used: Tensor | None) -> Tensor:
    """logits: [S, E] -> []: the mean over tokens of logsumexp squared, which keeps logits small."""
    squares = logits.logsumexp(dim=1).square()
    if used is None:
        return squares.sum() / max(len(squares), 1)
    return (squares * used).sum() / used.sum().clamp(min=1)
