"""`deepspeed.moe.layer.MoE`: `trilithon.MoE`, whose expert parameters carry DeepSpeed's marks.

A layer's experts are stacked: what one expert calls `up.weight` is one parameter [experts, ...] of `experts`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import trilithon


class MoE(trilithon.MoE):
    """As `trilithon.MoE`, with DeepSpeed's defaults: `eval_capacity_factor` 1.0, experts that begin as copies of the
    given one, and up to k=2 a balance loss of first choices only.

    [..., hidden_size] -> ([..., hidden_size], balance loss, tokens by expert). Expert parameters have `allreduce` False
    and `group_name` "ep_size_<n>". Raises ConfigError for arguments that do not fit.
    """

    def __init__(
        self, hidden_size: int, expert: nn.Module, num_experts: int = 1, ep_size: int = 1, k: int = 1,
        capacity_factor: float = 1.0, eval_capacity_factor: float = 1.0, *args: Any, **settings: Any,
    ) -> None:  # fmt: skip
        settings = {"aux_loss_counts": "first" if k <= 2 else "all", "expert_init": "copy"} | settings
        super().__init__(
            hidden_size, expert, num_experts, ep_size, k, capacity_factor, eval_capacity_factor, *args, **settings
        )
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_local_experts = num_experts // ep_size
        for param in self.experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = self.expert_group_name  # type: ignore[attr-defined]

    @property
    def deepspeed_moe(self) -> MoE:
        """Gate and experts, which are this module's own here."""
        return self

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Groups are made by initialize(), for all layers."""
