"""`deepspeed.runtime.zero.offload_config`: names of the places that state may rest in."""

from __future__ import annotations

from enum import StrEnum


class OffloadDeviceEnum(StrEnum):
    """`offload_param.device`, `offload_optimizer.device`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What `engine.offload_states(include=...)` names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]
