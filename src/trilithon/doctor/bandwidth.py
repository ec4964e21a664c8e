"""Quick measurements, each bounded in time: memory copy, two ranks over gloo, and the disk."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trilithon.doctor.machine import nearest_existing
from trilithon.errors import LaunchError
from trilithon.launch.local import run_module

MEMORY_BYTES = 128 * 2**20
DISK_BYTES = 64 * 2**20


def memory_copy() -> dict[str, Any]:
    """Bytes copied a second by one torch copy with its default threads (each byte is read once and written once)."""
    import torch

    source = torch.ones(MEMORY_BYTES // 4)
    target = torch.zeros_like(source)
    best = _best_of(3, lambda: target.copy_(source))
    return {"bytes": MEMORY_BYTES, "bytes_per_s": MEMORY_BYTES / best}


def two_ranks(timeout_s: float) -> dict[str, Any]:
    """Two processes of this machine gather and reduce-scatter 16 MiB over gloo; bytes each rank sends a second."""
    with tempfile.TemporaryDirectory(prefix="trilithon-doctor-") as folder:
        answer = Path(folder) / "answer.json"
        try:
            run_module("trilithon.doctor.two_ranks", [str(answer)], 2, timeout_s=timeout_s)
            measured: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return measured
        except LaunchError as error:
            return {"trouble": str(error)}


def disk(folder: Path) -> dict[str, Any]:
    """Bytes a second of writing 64 MiB with fsync and of reading them back past the page cache."""
    block = os.urandom(2**20)
    try:
        with tempfile.TemporaryFile(dir=nearest_existing(folder)) as file:
            start = time.perf_counter()
            for _ in range(DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            wrote = time.perf_counter() - start
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start = time.perf_counter()
            while file.read(2**20):
                pass
            read = time.perf_counter() - start
    except OSError as error:
        return {"trouble": f"{error.strerror} in {folder}"}
    return {"bytes": DISK_BYTES, "write_bytes_per_s": DISK_BYTES / wrote, "read_bytes_per_s": DISK_BYTES / read}


def _best_of(times: int, run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
