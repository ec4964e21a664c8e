"""`deepspeed.accelerator.real_accelerator`: the same names."""

from __future__ import annotations

from trilithon.compat.deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator, set_accelerator

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "set_accelerator"]
