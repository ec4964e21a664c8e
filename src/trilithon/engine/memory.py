"""Bytes that one engine holds on one rank, by category and by tier."""

from __future__ import annotations

from trilithon.contracts import Update
from trilithon.zero.sharding import ZeroSharding

Tiers = dict[str, dict[str, int]]


def by_category(sharding: ZeroSharding, update: Update | None) -> dict[str, int]:
    """All tiers together."""
    return {**sharding.bytes(), "optimizer": sum(update.bytes().values()) if update is not None else 0}


def by_tier(sharding: ZeroSharding, update: Update | None, waiting: int, *, state_on_device: bool) -> Tiers:
    """waiting: bytes of gradients of a delayed update. A machine without an accelerator counts its memory as "device"
    where nothing was asked to rest elsewhere."""
    tiers: Tiers = {"device": sharding.bytes()}

    def add(tier: str, category: str, size: int) -> None:
        here = tiers.setdefault(tier, {})
        here[category] = here.get(category, 0) + size

    state = update.bytes() if update is not None else {}
    for tier, size in state.items():
        place = "device" if state_on_device and tier == "host" else tier
        add(place, "buffers" if place == "host" and "disk" in state else "optimizer", size)
    if waiting:
        add("device", "delayed", waiting)
    return tiers
