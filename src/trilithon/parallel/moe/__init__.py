"""Mixtures of experts: a router sends each token to a few of many feed-forward blocks.

    layer = trilithon.MoE(hidden_size=512, expert=block, num_experts=8, ep_size=2, k=1)
    y, balance, counts = layer(x)

See docs/moe.md.
"""

from __future__ import annotations

from trilithon.parallel.moe.experts import Experts
from trilithon.parallel.moe.gate import Gate
from trilithon.parallel.moe.layer import MoE

__all__ = ["Experts", "Gate", "MoE"]
