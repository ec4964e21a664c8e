"""`deepspeed.runtime.fp16`."""

from __future__ import annotations

from trilithon.compat.deepspeed.resolve import resolver

__getattr__ = resolver(
    __name__,
    {},
    ("fused_optimizer", "loss_scaler", "unfused_optimizer"),
    {"onebit": "OneBitAdam, ZeroOneAdam and OneBitLamb are chosen by name in the configuration."},
)
