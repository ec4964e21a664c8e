"""`deepspeed.moe.sharded_moe`: the gates by themselves, as tables over tokens, experts and slots.

Decisions are those of `trilithon.parallel.moe.gate`, and tables those of `.dense`. Balance losses are GShard's, E times
the sum over experts of (mean probability x share of tokens).
"""

# S tokens, E experts, C slots per expert

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from trilithon.compat.deepspeed.moe.layer import MoE
from trilithon.errors import ConfigError
from trilithon.parallel.moe.dense import dense_weights
from trilithon.parallel.moe.gate import RoutingRule, decide

Gated = tuple[Tensor, Tensor, Tensor, Tensor]
"""(balance loss [], combination weights [S, E, C], where they are not zero [S, E, C] bool, tokens by expert [E])."""

MOELayer = MoE


def top1gating(
    logits: Tensor, capacity_factor: float, min_capacity: int, used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None, drop_tokens: bool = True, use_rts: bool = True, ep_group: Any = None,
    sparse_routes: bool = False, use_tutel: bool = False,
) -> Gated:  # fmt: skip
    """One expert per token, of logits [S, E]. used_token: [S], 0 for padding."""
    _refuse(ep_group, sparse_routes or use_tutel)
    noise: Any = noisy_gate_policy if noisy_gate_policy == "RSample" else None
    factor = capacity_factor if drop_tokens else None
    return _gate(logits, RoutingRule(1, factor, min_capacity, "rts" if use_rts else "position", noise), used_token)


def top2gating(
    logits: Tensor, capacity_factor: float, min_capacity: int, drop_tokens: bool = True, ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True, sparse_routes: bool = False,
) -> Gated:  # fmt: skip
    """Two experts per token; first choices have the slots before second ones. The loss counts first choices."""
    _refuse(ep_group, sparse_routes)
    factor = capacity_factor if drop_tokens else None
    return _gate(logits, RoutingRule(2, factor, min_capacity, "position", None, top2_2nd_expert_sampling))


def topkgating(
    logits: Tensor, k: int, capacity_factor: float, min_capacity: int, drop_tokens: bool = True, ep_group: Any = None,
    drop_policy: Literal["probs", "position"] = "probs", sparse_routes: bool = False,
) -> Gated:  # fmt: skip
    """k experts per token. drop_policy: "probs" keeps the most probable, "position" the first. All choices count."""
    _refuse(ep_group, sparse_routes)
    if drop_policy not in ("probs", "position"):
        raise ConfigError(f"drop_policy={drop_policy!r}: there are 'probs' and 'position'.")
    return _gate(logits, RoutingRule(k, capacity_factor if drop_tokens else None, min_capacity, drop_policy), counted=k)


def _refuse(ep_group: Any, other_routes: bool) -> None:
    if other_routes:
        raise ConfigError("sparse_routes and use_tutel have no counterpart: layers route by index already.")
    if ep_group is not None:
        raise ConfigError("ep_group: ranks agree on slots inside deepspeed.moe.layer.MoE; call the gate without it.")


def _gate(logits: Tensor, rule: RoutingRule, used: Tensor | None = None, counted: int = 1) -> Gated:
    probs = logits.float().softmax(dim=1)
    generator = torch.Generator(logits.device).manual_seed(int(torch.randint(2**62, ()))) if rule.random else None
    choice = decide(logits.float(), probs, rule, None if used is None else used != 0, generator)
    taken = choice.experts if choice.used is None else choice.experts[choice.used]
    numbers = torch.bincount(taken[:, :counted].reshape(-1), minlength=logits.shape[1])
    loss = logits.shape[1] * (probs.mean(0) * numbers / (len(logits) * counted)).sum()
    combine = dense_weights(probs, choice, rule, choice_major=rule.k <= 2)
    return loss, combine, combine != 0, choice.routed
