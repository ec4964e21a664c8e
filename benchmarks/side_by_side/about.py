"""Where and when a row was measured."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def about(script: str) -> dict[str, Any]:
    """date, hardware, versions and command line; load is the machine's, over one minute."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": f"{cpu_name()}, {cores} cores, {_memory_gib():.0f} GiB",
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": installed("torch"),
        "command": " ".join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
    }


def cpu_name() -> str:
    """The processor's model as Linux names it."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def installed(package: str) -> str | None:
    """The version of a package without importing it; None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line, after what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")


def _memory_gib() -> float:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (ValueError, OSError):
        return 0.0
