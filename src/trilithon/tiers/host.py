"""How much host memory this process may still take: what the machine has, and what a container or a limit allows."""

from __future__ import annotations

import resource
from pathlib import Path


def available_host_bytes() -> int | None:
    """The least of the system's estimate, the cgroup's room and the process's data limit; None if nothing is known."""
    found = [value for value in (_system(), _cgroup(), _limit()) if value is not None]
    return min(found) if found else None


def _system() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup() -> int | None:
    """Of the innermost group of version 2."""
    try:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / own[3:].lstrip("/")
        limit = (folder / "memory.max").read_text().strip()
        return None if limit == "max" else max(int(limit) - int((folder / "memory.current").read_text()), 0)
    except (OSError, ValueError, StopIteration):
        return None


def _limit() -> int | None:
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return soft
    return max(soft - used, 0)
