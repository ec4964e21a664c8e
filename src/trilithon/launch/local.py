"""A module of ours on a few processes of this machine, for a bounded time: what self-tests and comparisons need."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trilithon.errors import LaunchError
from trilithon.launch import child
from trilithon.launch.processes import NodeProcesses


def run_module(
    module: str,
    arguments: Sequence[str],
    nproc: int,
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `python -m module arguments...` on `nproc` ranks that can meet each other, and wait for all of them.

    RANK and WORLD_SIZE are set when there is more than one rank, one thread each unless OMP_NUM_THREADS says otherwise;
    `environment` adds to the caller's. Raises LaunchError with the first failing rank's traceback, or when
    `timeout_s` is over. No process is alive when this returns or raises.
    """
    port = _free_port()
    shared = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
    shared["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environments = [{**shared, **_rank_variables(rank, nproc, port)} for rank in range(nproc)]
    if nproc == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            environments[0].pop(name, None)
    with tempfile.TemporaryDirectory(prefix="trilithon-local-") as folder:
        records = [Path(folder, f"{rank}.json") for rank in range(nproc)]
        commands = [
            [sys.executable, child.__file__, str(record), str(os.getpid()), "module", module, *arguments]
            for record in records
        ]
        processes = NodeProcesses.start(commands, environments, records)
        try:
            _wait(processes, module, timeout_s)
        finally:
            processes.end(signal.SIGTERM, grace_s=2.0)


def _wait(processes: NodeProcesses, module: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        failure = processes.first_failure()
        if failure is not None:
            raise LaunchError(
                f"rank {failure.local_rank} of {module} ended with {failure.signal_name or failure.exit_status}.\n"
                f"{failure.traceback}".rstrip()
            )
        if processes.finished():
            return
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{module} was not done within {timeout_s:.0f} s. The machine is busy, or ranks cannot meet."
            )
        time.sleep(0.02)


def _rank_variables(rank: int, nproc: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
