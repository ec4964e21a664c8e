"""`deepspeed.runtime.zero.stage_1_and_2`: its memory estimates; the optimizer is the engine's own."""

from __future__ import annotations

from trilithon.compat.deepspeed.refused import refused
from trilithon.compat.deepspeed.runtime.zero.memory_estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

DeepSpeedZeroOptimizer = refused(
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", "deepspeed.initialize() makes the optimizer (engine.optimizer)."
)

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
