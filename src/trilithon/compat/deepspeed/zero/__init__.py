"""`deepspeed.zero`: the same names as `deepspeed.runtime.zero`."""

from __future__ import annotations

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
