"""From `offload` in the configuration to the place where state rests; every refusal is the same on all ranks."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from trilithon.config import OffloadConfig
from trilithon.contracts import Collectives, StateStore, Tag
from trilithon.errors import ConfigError, TrilithonError
from trilithon.optim.build import state_fields
from trilithon.optim.groups import AnyOptimizer, Group
from trilithon.tiers import DiskStore, FileIO, ResidentStore, RunFolder, SplitStore, Staging, free_bytes, page_up
from trilithon.tiers.disk import unusable
from trilithon.tiers.host import available_host_bytes
from trilithon.zero.masters import Placement

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SLOW_S = 10.0  # of disk time per step, from which on it is worth a warning
_SLACK = 1.02  # alignment of parameters and padding of files


@dataclass(frozen=True, slots=True)
class Needs:
    """What one rank will keep. fields: tensors per element, the master among them."""

    numel: int
    fields: int
    itemsize: int

    def state_bytes(self, ratio: float) -> int:
        return int(self.numel * self.fields * self.itemsize * ratio * _SLACK)

    def longest_bytes(self, sub_group_numel: int) -> int:
        """Of the longest slice, each field on pages of its own."""
        longest = min(sub_group_numel, int(self.numel * _SLACK) + 4096)
        return self.fields * page_up(longest * self.itemsize)


def require_known(optimizer: AnyOptimizer, groups: Sequence[Group]) -> int:
    """Tensors per element beside the master. Raises ConfigError for an optimizer that runs itself: its state is its."""
    fields = state_fields(optimizer, groups)
    if fields is None:
        owner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else groups[0].optimizer
        raise ConfigError(
            f"offload.state moves the state of adam, adamw, sgd, lion, adagrad and lamb; {type(owner).__name__} keeps "
            "its own. Use one of these (set config.optimizer, or pass torch.optim.AdamW and the like), or "
            'offload.state="device".'
        )
    return fields


def needs_of(model: nn.Module, optimizer: AnyOptimizer, groups: Sequence[Group], world_size: int) -> Needs:
    """Of this rank, from the model as the user made it."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    itemsize = max((8 if param.dtype == torch.float64 else 4 for param in trainable), default=4)
    numel = sum(param.numel() for param in trainable)
    return Needs(-(-numel // world_size), 1 + require_known(optimizer, groups), itemsize)


def make_placement(
    settings: OffloadConfig, needs: Needs, control: Collectives, device: torch.device
) -> Placement | None:
    """Where masters and moments rest; None on the device. Collective.

    Raises ConfigError, on all ranks, if memory, disk space or the folder does not suffice.
    """
    if settings.state == "device":
        return None
    near: set[str] = set()
    far: StateStore
    if settings.state == "host":
        together(lambda: free_for_state(needs.state_bytes(settings.ratio), "offload.state"), control)
        far = ResidentStore("host")
    else:
        assert settings.path is not None
        path = settings.path
        with room_on_disk(path, needs.state_bytes(settings.ratio), control):
            disk = far = together(lambda: _disk(settings, path, needs, device), control)
        if control.rank == 0:
            _tell_rate(disk, needs.state_bytes(settings.ratio))
    store = SplitStore(ResidentStore("device"), far, near.__contains__) if settings.ratio < 1 else far
    return Placement(
        store, settings.sub_group_numel, settings.ratio, near, settings.delayed_update, settings.state == "disk"
    )


def _disk(settings: OffloadConfig, path: Path, needs: Needs, device: torch.device) -> DiskStore:
    budget = settings.buffers * needs.longest_bytes(settings.sub_group_numel)
    staging = Staging(budget, pinned=device.type == "cuda")
    io = FileIO(settings.threads, settings.piece_bytes)
    expected = needs.state_bytes(settings.ratio)
    return DiskStore(path, staging, io, expected_bytes=expected, direct=settings.direct)


def _tell_rate(disk: DiskStore, size: int) -> None:
    """What a step will cost on this disk, from the first small write and read."""
    probe = disk.probe
    seconds = size / probe.read_rate + size / probe.write_rate
    logger.log(
        logging.WARNING if seconds > _SLOW_S else logging.INFO,
        "each step reads and writes %.3g GB of state per rank; in a first try %s wrote %.0f and read %.0f MB/s (%s); "
        "that makes about %.3g s a step",
        size / 1e9,
        disk.folder.parent,
        probe.write_rate / 1e6,
        probe.read_rate / 1e6,
        "past the page cache" if probe.direct else "through the page cache",
        seconds,
    )


def together(action: Callable[[], T], control: Collectives) -> T:
    """Do it on every rank; ConfigError on all of them if it fails on one."""
    found, refusal = None, None
    try:
        found = action()
    except (TrilithonError, OSError) as error:
        refusal = str(error)
    told = control.all_gather_object(refusal, Tag("state tier"))
    refusals = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if refusals:
        close = getattr(found, "close", None)
        if callable(close):
            close()
        raise ConfigError(" ".join(refusals))
    return found  # type: ignore[return-value]


def free_for_state(wanted: int, key: str) -> None:
    """Raises ConfigError if the host has less memory available; all ranks of this machine take from the same."""
    available = available_host_bytes()
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if available is not None and wanted * local > available:
        raise ConfigError(
            f'{key}="host" needs {wanted} bytes of host memory per rank ({local} ranks here), and {available} are '
            f'available on this machine. Use {key}="disk", more ranks, or keep less there.'
        )


@contextmanager
def room_on_disk(path: Path, wanted: int, control: Collectives) -> Iterator[None]:
    """Collective: all ranks may write under `path` and find room there. Raises ConfigError on all of them.

    A folder is made before space is measured, because what takes no files has no space either. It stays until the
    stores that are opened inside have theirs.
    """
    first = together(lambda: RunFolder(path), control)
    try:
        check_space(path, wanted, control)
        yield
    finally:
        first.close()


def check_space(path: Path, wanted: int, control: Collectives) -> None:
    """Ranks that share a filesystem share its space."""
    device, free = together(lambda: _measure(path), control)
    here: tuple[str, int] = (socket.gethostname(), device)
    told: list[Any] = control.all_gather_object((here, wanted, free), Tag("disk space"))
    short = []
    for place in dict.fromkeys(entry[0] for entry in told):
        total = sum(size for other, size, _ in told if other == place)
        free = min(space for other, _, space in told if other == place)
        if total > free:
            short.append(f"{total} bytes of state on {place[0]} and {free} bytes free in {path}")
    if short:
        raise ConfigError(
            f"offload.path has too little space: {'; '.join(short)}. Free space, name another folder, or lower "
            "offload.ratio."
        )


def _measure(path: Path) -> tuple[int, int]:
    """Number of the filesystem, and bytes free on it."""
    try:
        return os.stat(path).st_dev, free_bytes(path)
    except OSError as error:
        raise unusable(path, error) from error
