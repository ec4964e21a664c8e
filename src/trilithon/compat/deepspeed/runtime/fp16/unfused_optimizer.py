"""`deepspeed.runtime.fp16.unfused_optimizer`: the class by its name."""

from __future__ import annotations

from trilithon.compat.deepspeed.runtime.base_optimizer import FP16_UnfusedOptimizer

__all__ = ["FP16_UnfusedOptimizer"]
