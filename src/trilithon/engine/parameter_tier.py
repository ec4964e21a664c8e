"""From `offload.parameters` and `offload.gradients` to the stores in which slices rest; all ranks refuse alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from trilithon.config import OffloadConfig
from trilithon.contracts import Collectives, StateStore
from trilithon.engine.state_tier import free_for_state, room_on_disk, together
from trilithon.tiers import DiskStore, FileIO, ResidentStore, Staging, page_up
from trilithon.zero.resting import OpenStores, Resting, UnitSize


def gradient_tier(settings: OffloadConfig) -> str:
    """Where reduced gradients rest: as written, else where the parameters do."""
    return settings.gradients if settings.gradients is not None else settings.parameters


def open_stores(settings: OffloadConfig, control: Collectives, device: torch.device) -> OpenStores | None:
    """What makes the stores once the units are known; None if everything stays on the device.

    What it returns is collective and raises ConfigError, on all ranks, if memory, disk or folder do not suffice.
    """
    tiers = (settings.parameters, gradient_tier(settings))
    if tiers == ("device", "device"):
        return None

    def make(sizes: Sequence[UnitSize]) -> Resting:
        wanted = [
            [size.numel * size.values_itemsize for size in sizes],
            [size.numel * size.gradient_itemsize for size in sizes if size.gradient_itemsize],
        ]
        on_host = sum(sum(each) for each, tier in zip(wanted, tiers, strict=True) if tier == "host")
        if on_host:
            together(lambda: free_for_state(on_host, "offload.parameters"), control)
        on_disk = [sum(map(page_up, each)) for each, tier in zip(wanted, tiers, strict=True) if tier == "disk"]
        with ExitStack() as stack:
            if on_disk:
                assert settings.path is not None
                stack.enter_context(room_on_disk(settings.path, sum(on_disk), control))
            opened = _opened(settings, list(zip(tiers, wanted, strict=True)), control, device)
        return Resting(opened[0], opened[1], fallible="disk" in tiers)

    return make


def _opened(
    settings: OffloadConfig, wanted: Sequence[tuple[str, Sequence[int]]], control: Collectives, device: torch.device
) -> list[StateStore | None]:
    """A store for each (tier, sizes); none is left open if one cannot be."""
    opened: list[StateStore | None] = []
    try:
        for tier, sizes in wanted:
            opened.append(_store(settings, tier, sizes, control, device))
    except BaseException:
        for store in opened:
            if store is not None:
                store.close()
        raise
    return opened


def _store(
    settings: OffloadConfig, tier: str, sizes: Sequence[int], control: Collectives, device: torch.device
) -> StateStore | None:
    if tier == "device":
        return None
    if tier == "host":
        return ResidentStore("host")
    assert settings.path is not None
    path = settings.path
    return together(lambda: _disk(settings, path, sizes, device), control)


def _disk(settings: OffloadConfig, path: Path, sizes: Sequence[int], device: torch.device) -> DiskStore:
    largest = page_up(max(sizes, default=1))
    staging = Staging(settings.buffers * largest, pinned=device.type == "cuda")
    io = FileIO(settings.threads, settings.piece_bytes)
    return DiskStore(path, staging, io, expected_bytes=sum(map(page_up, sizes)), direct=settings.direct)
