"""`deepspeed.runtime.zero.config`: the numbers of the stages, which checkpoints of DeepSpeed refer to."""

from __future__ import annotations

from enum import IntEnum


class ZeroStageEnum(IntEnum):
    """What is cut over the data-parallel ranks."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


__all__ = ["ZeroStageEnum"]
