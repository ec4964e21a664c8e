"""Facts about the machine that need no torch: versions, tools, memory, shared memory, disk, limits."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("trilithon", "torch", "numpy", "pydantic", "numba", "triton", "tokenizers", "tensorboard", "matplotlib")
TOOLS = ("c++", "g++", "gcc", "clang", "nvcc", "ninja", "ssh", "srun")


def versions() -> dict[str, str | None]:
    """Installed version of each package we can use; None where it is absent. Nothing is imported."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if found["trilithon"] is None:  # run from a source tree
        import trilithon

        found["trilithon"] = trilithon.__version__
    return found


def tools() -> dict[str, str | None]:
    """Where each outside tool is; all of them are optional."""
    return {name: shutil.which(name) for name in TOOLS}


def host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> dict[str, int | None]:
    """Bytes of host memory, what is available, and the container's limit (None: no limit known)."""
    values: dict[str, int] = {}
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        values = {}
    limit = None
    for file in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"):
        try:
            limit = int(file.read_text(encoding="ascii"))
            break
        except (OSError, ValueError):  # absent, or the word "max"
            continue
    total = values.get("MemTotal")
    if limit is not None and total is not None and limit >= total:
        limit = None
    return {"total_bytes": total, "available_bytes": values.get("MemAvailable"), "limit_bytes": limit}


def space(folder: Path) -> dict[str, Any]:
    """Total and free bytes of the file system that holds `folder` (or its nearest existing parent)."""
    there = nearest_existing(folder)
    try:
        usage = shutil.disk_usage(there)
    except OSError as error:
        return {"folder": str(folder), "total_bytes": None, "free_bytes": None, "trouble": error.strerror}
    return {
        "folder": str(folder),
        "total_bytes": usage.total,
        "free_bytes": usage.free,
        "writable": os.access(there, os.W_OK),
    }


def nearest_existing(folder: Path) -> Path:
    """`folder` or the closest parent that exists."""
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where files that can be made again are kept: $XDG_CACHE_HOME/trilithon, or ~/.cache/trilithon."""
    base = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "trilithon"


def limits() -> dict[str, int]:
    """Soft limits of this process that training runs into."""
    return {"open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}


def host_name_resolves(timeout_s: float = 3.0) -> bool:
    """Whether the machine's own name leads to an address; ranks look for each other through it."""
    answer: list[bool] = []

    def look() -> None:
        try:
            socket.getaddrinfo(socket.gethostname(), None)
            answer.append(True)
        except OSError:
            answer.append(False)

    thread = threading.Thread(target=look, daemon=True)  # a resolver without a network may block for minutes
    thread.start()
    thread.join(timeout_s)
    return bool(answer and answer[0])


def system() -> dict[str, Any]:
    """Operating system and cores this process may use."""
    return {
        "platform": platform.platform(terse=True),
        "machine": platform.machine(),
        "executable": sys.executable,
        "cores": len(os.sched_getaffinity(0)),
    }
