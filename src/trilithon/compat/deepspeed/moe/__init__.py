"""`deepspeed.moe`: mixtures of experts, on `trilithon.MoE`."""

from __future__ import annotations

from trilithon.compat.deepspeed.resolve import resolver

__getattr__ = resolver(__name__, {}, ("experts", "layer", "sharded_moe", "utils"))
