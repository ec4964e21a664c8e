"""`deepspeed.moe.sharded_moe`: the gates by themselves, as tables over tokens, experts and slots.

Decisions are those of `trilithon.parallel.moe.gate`, spread out into dense tables for programs that want them; a layer
makes no such tables. Balance losses are GShard's, E times the sum over experts of (mean probability x share of tokens).
"""

# S tokens, E experts, K choices per token, C slots per expert

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trilithon.compat.deepspeed.moe.layer import MoE
from trilithon.compat.deepspeed.refused import refused
from trilithon.errors import ConfigError
from trilithon.parallel.moe.gate import DropPolicy, RoutingRule, combine_weights, decide

Gated = tuple[Tensor, Tensor, Tensor, Tensor]
"""(balance loss [], combination weights [S, E, C], where they are not zero [S, E, C] bool, tokens by expert [E])."""

MOELayer = MoE
TopKGate = refused("moe.sharded_moe.TopKGate", "Use deepspeed.moe.layer.MoE, whose gate is `layer.gate`.")


def top1gating(
    logits: Tensor, capacity_factor: float, min_capacity: int, used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None, drop_tokens: bool = True, use_rts: bool = True, ep_group: Any = None,
    sparse_routes: bool = False, use_tutel: bool = False,
) -> Gated:  # fmt: skip
    """One expert per token, of logits [S, E]. used_token: [S], 0 for padding."""
    _refuse(ep_group, sparse_routes, use_tutel)
    noise: Any = noisy_gate_policy if noisy_gate_policy == "RSample" else None
    policy: DropPolicy = "rts" if use_rts else "position"
    rule = RoutingRule(1, capacity_factor if drop_tokens else None, min_capacity, policy, noise)
    return _gate(logits, rule, used_token, counted=1)


def top2gating(
    logits: Tensor, capacity_factor: float, min_capacity: int, drop_tokens: bool = True, ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True, sparse_routes: bool = False,
) -> Gated:  # fmt: skip
    """Two experts per token; first choices have the slots before second ones. The loss counts first choices."""
    _refuse(ep_group, sparse_routes, False)
    factor = capacity_factor if drop_tokens else None
    rule = RoutingRule(2, factor, min_capacity, "position", None, top2_2nd_expert_sampling)
    return _gate(logits, rule, None, counted=1)


def topkgating(
    logits: Tensor, k: int, capacity_factor: float, min_capacity: int, drop_tokens: bool = True, ep_group: Any = None,
    drop_policy: str = "probs", sparse_routes: bool = False,
) -> Gated:  # fmt: skip
    """k experts per token. drop_policy: "probs" keeps the most probable, "position" the first. All choices count."""
    _refuse(ep_group, sparse_routes, False)
    if drop_policy not in ("probs", "position"):
        raise ConfigError(f"drop_policy={drop_policy!r}: there are 'probs' and 'position'.")
    policy: DropPolicy = "probs" if drop_policy == "probs" else "position"
    return _gate(
        logits, RoutingRule(k, capacity_factor if drop_tokens else None, min_capacity, policy), None, counted=k
    )


def _refuse(ep_group: Any, sparse_routes: bool, use_tutel: bool) -> None:
    if sparse_routes or use_tutel:
        raise ConfigError("sparse_routes and use_tutel have no counterpart: layers route by index already.")
    if ep_group is not None:
        raise ConfigError("ep_group: ranks agree on slots inside deepspeed.moe.layer.MoE; call the gate without it.")


def _gate(logits: Tensor, rule: RoutingRule, used: Tensor | None, counted: int) -> Gated:
    probs = logits.float().softmax(dim=1)
    generator = torch.Generator(logits.device).manual_seed(int(torch.randint(2**62, ()))) if rule.random else None
    choice = decide(logits.float(), probs, rule, None if used is None else used != 0, generator)
    num_tokens, num_experts = logits.shape
    weights = combine_weights(probs, choice, rule)
    chosen = torch.zeros(rule.k, num_tokens, num_experts, dtype=torch.bool, device=logits.device)
    chosen.scatter_(2, choice.experts.t().unsqueeze(2), True)
    if used is not None:
        chosen &= (used != 0).view(1, -1, 1)
    share = chosen[:counted].float().sum(0).mean(0) / counted
    loss = num_experts * (probs.mean(0) * share).sum()
    capacity = choice.capacity if choice.capacity is not None else int(choice.routed.max())
    kept = chosen & choice.kept.t().unsqueeze(2)
    by_token = kept.any(0).cumsum(0) - 1
    by_choice = kept.reshape(-1, num_experts).cumsum(0).view_as(kept) - 1
    combine = torch.zeros(num_tokens, num_experts, capacity, dtype=weights.dtype, device=logits.device)
    for place in range(rule.k):
        token, expert = kept[place].nonzero(as_tuple=True)
        slot = by_choice[place, token, expert] if rule.k <= 2 else by_token[token, expert]
        combine = combine.index_put((token, expert, slot), weights[token, place])
    return loss, combine, combine != 0, choice.routed
