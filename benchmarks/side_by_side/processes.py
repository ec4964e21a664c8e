"""Starting the ranks of a system, asking them with a bounded wait, and ending them for certain."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from side_by_side.catalogue import System
from side_by_side.rank import spec_of
from side_by_side.shape import Shape

# As trilithon sets them in its own processes (see docs/performance.md); for `--allocator kept`, in everybody's.
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 4096), "MALLOC_MMAP_THRESHOLD_": str(2**31 - 4096)}
_TAIL_LINES = 15


class FailedError(RuntimeError):
    """A rank failed, ended, or did not answer in time."""


@functools.cache
def namespace_command() -> tuple[str, ...]:
    """What gives a command a network namespace of its own when put before it; empty where that is not permitted."""
    if shutil.which("unshare") is None:
        return ()
    for command in (("unshare", "-n"), ("unshare", "-r", "-n")):
        if subprocess.run([*command, "true"], capture_output=True, timeout=20, check=False).returncode == 0:
            return command
    return ()


class Ranks:
    """The processes of one system, alive from construction to `close`."""

    def __init__(
        self, system: System, shape: Shape, world_size: int, *, threads: int, namespace: bool, allocator: str,
    ) -> None:  # fmt: skip
        self.system, self.world_size = system, world_size
        command = namespace_command() if namespace else ()
        self.wire_is_measured = bool(command)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `close`)
        pairs = [socket.socketpair() for _ in range(world_size)]
        self._sockets = [mine for mine, _ in pairs]
        self._received = [b""] * world_size
        theirs = [other for _, other in pairs]
        here = str(Path(__file__).resolve().parents[1])
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
        environment.update(KEEP_FREED_MEMORY if allocator == "kept" else {})
        spec = spec_of(system, shape, threads=threads, port=_free_port())
        descriptors = [str(other.fileno()) for other in theirs]
        self._process = subprocess.Popen(
            [*command, sys.executable, "-m", "side_by_side.rank", spec, *descriptors],
            env=environment,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[other.fileno() for other in theirs],
            start_new_session=True,  # Ctrl-C reaches the benchmark only, which then ends these
        )
        for other in theirs:
            other.close()

    def ask(self, order: dict[str, Any] | None, limit_s: float) -> list[dict[str, Any]]:
        """One answer of every rank to `order`; None only listens. Raises FailedError, and then the ranks are gone."""
        try:
            if order is not None:
                for mine in self._sockets:
                    mine.sendall((json.dumps(order) + "\n").encode())
            return self._listen(time.monotonic() + limit_s, limit_s)
        except (OSError, FailedError) as error:
            self._end()
            raise FailedError(f"{self.system.name}: {error}{self._tail()}") from None

    def _listen(self, deadline: float, limit_s: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self.world_size:
            waiting = {mine: rank for rank, mine in enumerate(self._sockets) if rank not in answers}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise FailedError(f"ranks {sorted(waiting.values())} did not answer within {limit_s:g} s")
            for mine in ready:
                rank = waiting[mine]
                data = mine.recv(1 << 16)
                if not data:
                    raise FailedError(f"rank {rank} ended without an answer")
                self._received[rank] += data
                text, found, rest = self._received[rank].partition(b"\n")
                if found:
                    answers[rank], self._received[rank] = json.loads(text), rest
                    if "error" in answers[rank]:
                        raise FailedError(f"rank {rank} failed: {answers[rank]['error']}")
        return [answers[rank] for rank in range(self.world_size)]

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().splitlines()[-_TAIL_LINES:]
        return "\n  " + "\n  ".join(lines) if lines else ""

    def _end(self) -> None:
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End every process of the system. Idempotent."""
        self._end()
        for mine in self._sockets:
            mine.close()
        self._log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
