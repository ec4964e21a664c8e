"""Mixtures of experts: a router sends each token to a few of many feed-forward blocks.

    layer = trilithon.MoE(hidden_size=512, expert=block, num_experts=8, ep_size=2, k=1)
    y, balance, counts = layer(x)

See docs/moe.md.
"""

from __future__ import annotations

from trilithon.parallel.moe.blocks import FeedForward
from trilithon.parallel.moe.convert import ConvertedBlock, convert, layers, load_report
from trilithon.parallel.moe.dense import dense_routing, dense_weights
from trilithon.parallel.moe.experts import Experts
from trilithon.parallel.moe.gate import Gate
from trilithon.parallel.moe.layer import MoE
from trilithon.parallel.moe.merge import Utilization, aggregate, choose_experts, keep_experts, prune

__all__ = [
    "ConvertedBlock",
    "Experts",
    "FeedForward",
    "Gate",
    "MoE",
    "Utilization",
    "aggregate",
    "choose_experts",
    "convert",
    "dense_routing",
    "dense_weights",
    "keep_experts",
    "layers",
    "load_report",
    "prune",
]
