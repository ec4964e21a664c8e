"""`deepspeed.runtime.zero.stage3`: its memory estimates; the optimizer is the engine's own."""

from __future__ import annotations

from trilithon.compat.deepspeed.runtime.base_optimizer import DeepSpeedZeroOptimizer_Stage3
from trilithon.compat.deepspeed.runtime.zero.memory_estimates import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
    model_to_params,
)

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "model_to_params",
]
