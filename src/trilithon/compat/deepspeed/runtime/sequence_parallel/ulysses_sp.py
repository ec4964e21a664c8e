"""`deepspeed.runtime.sequence_parallel.ulysses_sp`."""

from __future__ import annotations

from trilithon.compat.deepspeed.refused import refused

_WAY = "Set mesh.sequence in a native configuration and use trilithon.initialize: attention layers are found by itself."

UlyssesSPAttentionHF = refused("runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF", _WAY)
UlyssesSPDataLoaderAdapter = refused("runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter", _WAY)
