"""Routing as a dense table over tokens, experts and slots, for layers written as products over all of them.

    balance_loss, weights, tokens_by_expert = dense_routing(logits, rule)
    inputs = torch.einsum("sec,sm->ecm", (weights != 0).to(x.dtype), x)      # of every slot of every expert
    y = torch.einsum("sec,ecm->sm", weights, outputs)

`MoE` makes no such table; it is for looking at decisions and for layers of one's own. (The form of Lepikhin et al.
2020, arXiv:2006.16668, section 2.2.)
"""

# S tokens, E experts, K choices per token, C slots per expert

from __future__ import annotations

import torch
from torch import Tensor

from trilithon.parallel.moe.gate import Choice, RoutingRule, combine_weights, decide


def dense_routing(
    logits: Tensor, rule: RoutingRule, used: Tensor | None = None, *, counted: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Route tokens by their scores alone. Returns (balance loss [], weights [S, E, C], tokens by expert [E] i64).

    logits: [S, E]; used: [S] bool, tokens that are not padding. The loss is E times the sum over experts of (mean
    probability x share of tokens), where the first `counted` choices of a token count (Lepikhin et al. 2020,
    arXiv:2006.16668, section 2.2). What is drawn follows torch's default generator of the host. Raises ConfigError for
    a rule that does not fit the number of experts.
    """
    scores = logits.float()
    probs = scores.softmax(dim=1)
    generator = torch.Generator(logits.device).manual_seed(int(torch.randint(2**62, ()))) if rule.random else None
    choice = decide(scores, probs, rule, used, generator)
    taken = choice.experts if choice.used is None else choice.experts[choice.used]
    numbers = torch.bincount(taken[:, :counted].reshape(-1), minlength=logits.shape[1])
    loss = logits.shape[1] * (probs.mean(0) * numbers / (len(logits) * counted)).sum()
    return loss, dense_weights(probs, choice, rule, choice_major=rule.k <= 2), choice.routed


def dense_weights(probs: Tensor, choice: Choice, rule: RoutingRule, *, choice_major: bool = True) -> Tensor:
    """[S, E, C]: what slot c of expert e counts in the sum of token s, zero where that is not this token's slot.

    probs: [S, E]. choice_major: the slots of an expert go to all first choices before all second ones; else in order of
    tokens. C is the capacity, or as many as the fullest expert needs. Gradients flow to probs.
    """
    num_tokens, num_experts = probs.shape
    weights = combine_weights(probs, choice, rule)
    kept = torch.zeros(rule.k, num_tokens, num_experts, dtype=torch.bool, device=probs.device)
    kept.scatter_(2, choice.experts.t().unsqueeze(2), choice.kept.t().unsqueeze(2))
    before = (
        kept.reshape(-1, num_experts).cumsum(0).view_as(kept) if choice_major else kept.any(0).cumsum(0).expand_as(kept)
    )
    capacity = choice.capacity if choice.capacity is not None else int(choice.routed.max())
    table = torch.zeros(num_tokens, num_experts, capacity, dtype=weights.dtype, device=probs.device)
    place, token, expert = kept.nonzero(as_tuple=True)
    return table.index_put((token, expert, before[place, token, expert] - 1), weights[token, place])
