"""`deepspeed.runtime.zero.stage3`: its memory estimates; the optimizer is the engine's own."""

from __future__ import annotations

from trilithon.compat.deepspeed.refused import refused
from trilithon.compat.deepspeed.runtime.zero.memory_estimates import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
    model_to_params,
)

DeepSpeedZeroOptimizer_Stage3 = refused(
    "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", "deepspeed.initialize() makes the optimizer (engine.optimizer)."
)

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "model_to_params",
]
