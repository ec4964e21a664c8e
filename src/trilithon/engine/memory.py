"""Bytes that one engine holds on one rank, by category and by tier."""

from __future__ import annotations

import torch
from torch import nn

from trilithon.checkpointing import Recompute
from trilithon.contracts import Update
from trilithon.engine.applying import Applying
from trilithon.tiers.host import available_host_bytes
from trilithon.zero.sharding import ZeroSharding

Tiers = dict[str, dict[str, int]]


def has_room_for(module: nn.Module, device: torch.device) -> bool:
    """The device has twice the bytes of the module's whole parameters free; nothing known is no room."""
    needed = sum(param.numel() * param.element_size() for param in module.parameters())
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_bytes() or 0
    return 2 * needed < free


def by_category(sharding: ZeroSharding, update: Update | None, recompute: Recompute | None) -> dict[str, int]:
    """All tiers together."""
    found = {**sharding.bytes(), "optimizer": sum(update.bytes().values()) if update is not None else 0}
    for sizes in sharding.resting_bytes().values():
        for category, size in sizes.items():
            found[category] = found.get(category, 0) + size
    if recompute is not None:
        found["checkpoints"] = sum(recompute.bytes().values())
    return found


def by_tier(
    sharding: ZeroSharding, update: Update | None, recompute: Recompute | None, applying: Applying | None, *,
    state_on_device: bool,
) -> Tiers:  # fmt: skip
    """Gradients of a delayed update are "delayed". A machine without an accelerator counts its memory as "device"
    where nothing was asked to rest elsewhere."""
    tiers: Tiers = {"device": sharding.bytes()}

    def add(tier: str, category: str, size: int) -> None:
        here = tiers.setdefault(tier, {})
        here[category] = here.get(category, 0) + size

    state = update.bytes() if update is not None else {}
    for tier, size in state.items():
        place = "device" if state_on_device and tier == "host" else tier
        add(place, "buffers" if place == "host" and "disk" in state else "optimizer", size)
    for tier, sizes in sharding.resting_bytes().items():
        for category, size in sizes.items():
            add(tier, category, size)
    for tier, size in (recompute.bytes() if recompute is not None else {}).items():
        add(tier, "checkpoints", size)
    waiting = applying.bytes() if applying is not None else 0
    if waiting:
        add("device", "delayed", waiting)
    return tiers
