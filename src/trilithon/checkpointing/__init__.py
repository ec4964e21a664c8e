"""Activations: forget them in forward, compute them again in backward; what is kept rests on the device or the host.

engine = trilithon.initialize(model, {"recompute": {"tier": "host"}, ...})     # whole blocks, found by themselves
y = trilithon.checkpointing.recomputed(block, x)                                # or by hand, anywhere in a model
"""

from __future__ import annotations

from trilithon.checkpointing.blocks import chosen_blocks
from trilithon.checkpointing.boundary import Boundary, ReportTimes, Times
from trilithon.checkpointing.by_hand import (
    checkpoint,
    configure,
    configured,
    is_configured,
    kept_bytes,
    random_streams,
    reconfigure,
    reset,
    seed_streams,
    tensor_ranks,
    times,
    unconfigure,
)
from trilithon.checkpointing.contiguous import Buffers, ContiguousRest
from trilithon.checkpointing.offload import HostRest
from trilithon.checkpointing.partition import PartitionedRest
from trilithon.checkpointing.recompute import Manner, Recompute, make_manner, recomputed, recomputed_as
from trilithon.checkpointing.rest import DeviceRest, Kept, Rest
from trilithon.checkpointing.selective import KeptResults, keep_named
from trilithon.checkpointing.streams import RandomStreams, seed_tensor_ranks

__all__ = [
    "Boundary",
    "Buffers",
    "ContiguousRest",
    "DeviceRest",
    "HostRest",
    "Kept",
    "KeptResults",
    "Manner",
    "PartitionedRest",
    "RandomStreams",
    "Recompute",
    "ReportTimes",
    "Rest",
    "Times",
    "checkpoint",
    "chosen_blocks",
    "configure",
    "configured",
    "is_configured",
    "keep_named",
    "kept_bytes",
    "make_manner",
    "random_streams",
    "recomputed",
    "recomputed_as",
    "reconfigure",
    "reset",
    "seed_streams",
    "seed_tensor_ranks",
    "tensor_ranks",
    "times",
    "unconfigure",
]
