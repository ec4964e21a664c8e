"""`deepspeed.runtime.zero.stage_1_and_2`: its memory estimates; the optimizer is the engine's own."""

from __future__ import annotations

from trilithon.compat.deepspeed.runtime.base_optimizer import DeepSpeedZeroOptimizer
from trilithon.compat.deepspeed.runtime.zero.memory_estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
