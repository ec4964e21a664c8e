"""`deepspeed.moe.experts`."""

from __future__ import annotations

from trilithon.parallel.moe.experts import Experts

__all__ = ["Experts"]
