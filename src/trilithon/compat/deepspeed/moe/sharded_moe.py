"""`deepspeed.moe.sharded_moe`: the gates by themselves, on `trilithon.parallel.moe.dense_routing`."""

# S tokens, E experts, C slots per expert

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from trilithon.compat.deepspeed.moe.layer import MoE
from trilithon.errors import ConfigError
from trilithon.parallel.moe.dense import dense_routing
from trilithon.parallel.moe.gate import RoutingRule

Gated = tuple[Tensor, Tensor, Tensor, Tensor]
"""(balance loss [], combination weights [S, E, C], where they are not zero [S, E, C] bool, tokens by expert [E])."""

MOELayer = MoE


def top1gating(
    logits: Tensor, capacity_factor: float, min_capacity: int, used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None, drop_tokens: bool = True, use_rts: bool = True, ep_group: Any = None,
    sparse_routes: bool = False, use_tutel: bool = False,
) -> Gated:  # fmt: skip
    """One expert per token, of logits [S, E]. used_token: [S], 0 for padding."""
    noise: Any = noisy_gate_policy if noisy_gate_policy == "RSample" else None
    factor = capacity_factor if drop_tokens else None
    rule = RoutingRule(1, factor, min_capacity, "rts" if use_rts else "position", noise)
    return _gate(logits, rule, ep_group, sparse_routes or use_tutel, None if used_token is None else used_token != 0)


def top2gating(
    logits: Tensor, capacity_factor: float, min_capacity: int, drop_tokens: bool = True, ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True, sparse_routes: bool = False,
) -> Gated:  # fmt: skip
    """Two experts per token; first choices have the slots before second ones. The loss counts first choices."""
    factor = capacity_factor if drop_tokens else None
    rule = RoutingRule(2, factor, min_capacity, "position", None, top2_2nd_expert_sampling)
    return _gate(logits, rule, ep_group, sparse_routes)


def topkgating(
    logits: Tensor, k: int, capacity_factor: float, min_capacity: int, drop_tokens: bool = True, ep_group: Any = None,
    drop_policy: Literal["probs", "position"] = "probs", sparse_routes: bool = False,
) -> Gated:  # fmt: skip
    """k experts per token. drop_policy: "probs" keeps the most probable, "position" the first. All choices count."""
    if drop_policy not in ("probs", "position"):
        raise ConfigError(f"drop_policy={drop_policy!r}: there are 'probs' and 'position'.")
    rule = RoutingRule(k, capacity_factor if drop_tokens else None, min_capacity, drop_policy)
    return _gate(logits, rule, ep_group, sparse_routes, counted=k)


def _gate(
    logits: Tensor, rule: RoutingRule, ep_group: Any, other_routes: bool, used: Tensor | None = None, counted: int = 1
) -> Gated:
    if other_routes:
        raise ConfigError("sparse_routes and use_tutel have no counterpart: layers route by index already.")
    if ep_group is not None:
        raise ConfigError("ep_group: ranks agree on slots inside deepspeed.moe.layer.MoE; call the gate without it.")
    loss, weights, routed = dense_routing(logits, rule, used, counted=counted)
    return loss, weights, weights != 0, routed
