"""How experts are spread over ranks. Which layers have experts, and how many, the model says."""

from __future__ import annotations

from typing import Literal

from trilithon.config.base import Flag, Positive, Section


class MoEConfig(Section):
    """The order of ranks in expert-parallel groups, and how tokens travel inside them."""

    data_before_experts: Flag = False
    """false: the ranks of an expert group, between which tokens travel, are neighbours. true: the ranks that hold the
    same experts are, between which their gradients are reduced."""
    all_to_all: Literal["flat", "hierarchical"] = "flat"
    """flat: every rank sends to every other. hierarchical: inside nodes, then between them: fewer messages, about twice
    the bytes, the same results (Rajbhandari et al. 2022, arXiv:2201.05596, section 5.3)."""
    node_size: Positive | None = None
    """Ranks on one node, for the hierarchical exchange. null: what the launcher says (LOCAL_WORLD_SIZE)."""
