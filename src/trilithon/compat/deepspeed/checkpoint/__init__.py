"""`deepspeed.checkpoint`."""

from __future__ import annotations

from trilithon.compat.deepspeed.checkpoint.constants import (
    PARAMETER_TO_AVERAGE_PATTERNS,
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    PIPELINE_REPLICATED_PARAMETER_PATTERNS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
    VOCABULARY_PARAMETER_PATTERNS,
)
from trilithon.compat.deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint
from trilithon.compat.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from trilithon.compat.deepspeed.resolve import resolver

__all__ = [
    "PARAMETER_TO_AVERAGE_PATTERNS",
    "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS",
    "PIPELINE_REPLICATED_PARAMETER_PATTERNS",
    "TP_REPLICATED_PARAMETER_PATTERNS",
    "UNIVERSAL_CHECKPOINT_INFO",
    "VOCABULARY_PARAMETER_PATTERNS",
    "DeepSpeedCheckpoint",
    "clone_tensors_for_torch_save",
]

__getattr__ = resolver(__name__, {}, ("ds_to_universal", "universal_checkpoint"))
