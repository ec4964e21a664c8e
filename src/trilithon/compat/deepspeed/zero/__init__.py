"""`deepspeed.zero`: the same names as `deepspeed.runtime.zero`."""

from __future__ import annotations

from trilithon.compat.deepspeed.resolve import resolver
from trilithon.compat.deepspeed.runtime.zero import (
    DeepSpeedZeRoOffload,
    GatheredParameters,
    Init,
    MiCS_Init,
    TiledLinear,
    TiledLinearReturnBias,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)

__all__ = [
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

_PARTS = (
    *("config", "linear", "offload_config", "parameter_offload", "partition_parameters", "stage3", "stage_1_and_2"),
    *("tiling", "utils"),
)
__getattr__ = resolver(__name__, {part: f"runtime.zero:{part}" for part in _PARTS})
