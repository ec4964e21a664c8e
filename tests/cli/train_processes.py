"""`trilithon train` as processes: started, watched and ended by tests.

Warm ones (see `warm_python`), unless a test looks at the process tree.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from warm_python import program_of, python

SMALL = ("--model", "nano", "--context", "32", "--micro-batch", "2", "--eval-batches", "1", "--sample-tokens", "4")
SMALL += ("--set", "monitor.tensorboard=false", "--set", "monitor.csv=false")


def start(*arguments: object, launcher: tuple[str, ...] = (), cold: bool = False) -> subprocess.Popen[str]:
    taken = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
    return subprocess.Popen(
        [sys.executable if cold else python(), "-m", *launcher, "trilithon.cli.main", "train", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name not in taken},
    )


def end(process: subprocess.Popen[str], limit_s: float = 120) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    return process.returncode, out, err


def ranks_of(launcher: int, what: str = "trilithon.pretrain.rank") -> list[int]:
    """Process ids of the ranks that a launcher started and that still run."""
    found, launcher = [], program_of(launcher)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_text()
            except OSError:
                continue
            if parent == launcher and what in command:
                found.append(int(entry.name))
    return sorted(found)


def wait_for_records(out: Path, process: subprocess.Popen[str]) -> None:
    """Until the run has recorded a step, so that its ranks are in the loop."""
    deadline = time.monotonic() + 90
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().strip()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no step was recorded"
        time.sleep(0.1)


def gone(pids: list[int]) -> bool:
    pids, deadline = [*pids, *map(program_of, pids)], time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str], what: str, limit_s: float = 90) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert process.poll() is None, (what, process.communicate())
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
