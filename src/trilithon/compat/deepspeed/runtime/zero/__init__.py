"""`deepspeed.runtime.zero`: parameters cut over ranks (stage 3), on `trilithon.zero`."""

from __future__ import annotations

from trilithon.compat.deepspeed.refused import refused
from trilithon.compat.deepspeed.resolve import resolver
from trilithon.compat.deepspeed.runtime.zero.parameter_offload import (
    DeepSpeedZeRoOffload,
    unwrap_model_for_generation,
)
from trilithon.compat.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from trilithon.compat.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias

MiCS_Init = refused("zero.MiCS_Init", "Build the model under deepspeed.zero.Init.")

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

__getattr__ = resolver(__name__, {}, ("config", "linear", "offload_config", "stage3", "stage_1_and_2", "utils"))
