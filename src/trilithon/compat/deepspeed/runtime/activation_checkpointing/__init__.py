"""`deepspeed.runtime.activation_checkpointing`."""

from __future__ import annotations

from trilithon.compat.deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]
