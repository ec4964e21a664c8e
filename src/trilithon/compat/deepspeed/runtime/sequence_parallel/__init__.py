"""`deepspeed.runtime.sequence_parallel`."""

from __future__ import annotations

from trilithon.compat.deepspeed.resolve import resolver

__getattr__ = resolver(__name__, {}, ("ulysses_sp",))
