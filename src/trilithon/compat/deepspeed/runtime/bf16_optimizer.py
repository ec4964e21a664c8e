"""`deepspeed.runtime.bf16_optimizer`: the class by its name."""

from __future__ import annotations

from trilithon.compat.deepspeed.runtime.base_optimizer import BF16_Optimizer

__all__ = ["BF16_Optimizer"]
