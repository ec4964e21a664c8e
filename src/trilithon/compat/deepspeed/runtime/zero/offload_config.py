"""`deepspeed.runtime.zero.offload_config`: names of the places that state may rest in."""

from __future__ import annotations

from enum import StrEnum


class OffloadDeviceEnum(StrEnum):
    """`offload_param.device`, `offload_optimizer.device`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


__all__ = ["OffloadDeviceEnum"]
