"""Activations: forget them in forward, compute them again in backward; what is kept rests on the device or the host.

engine = trilithon.initialize(model, {"recompute": {"tier": "host"}, ...})     # whole blocks, found by themselves
y = trilithon.checkpointing.recomputed(block, x)                                # or by hand, anywhere in a model
"""

from __future__ import annotations

from trilithon.checkpointing.offload import DeviceRest, HostRest, Rest
from trilithon.checkpointing.recompute import Recompute, chosen_blocks, recomputed

__all__ = ["DeviceRest", "HostRest", "Recompute", "Rest", "chosen_blocks", "recomputed"]
