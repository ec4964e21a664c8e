"""How experts are spread over ranks. Which layers have experts, and how many, the model says."""

from __future__ import annotations

from trilithon.config.base import Flag, Section


class MoEConfig(Section):
    """The order of ranks in expert-parallel groups."""

    data_before_experts: Flag = False
    """false: the ranks of an expert group, between which tokens travel, are neighbours. true: the ranks that hold the
    same experts are, between which their gradients are reduced."""
