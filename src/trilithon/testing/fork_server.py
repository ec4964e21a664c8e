"""The warm fork server: one process that has imported torch once and forks ranks on request.

Importing torch costs seconds, a fork costs milliseconds. What always holds: the server never starts a thread (a fork
copies only the calling thread, so a pool would be dead in the child), it serves one job at a time, every wait has an
end, and a rank outlives neither its job nor the server nor the caller. The caller's end of the connection is the life
line: at end of file the server ends the ranks of the running job and itself.

The rendezvous store of a job lives in a forked process of its own, which takes over a socket that is already listening
on a port chosen by the kernel: no other process can take that port in between, and the store survives the end of any
rank.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import Connection
from typing import IO, Any

import torch
from torch._C._distributed_c10d import TCPStore

from trilithon.testing.rank_process import DUMP_SIGNAL, Job, Report, Streams, end_with_parent, run_rank

_GRACE_S = 0.5  # how long the other ranks may still report an error of their own after the first failure
_DUMP_S = 1.0  # how long ranks have to write their stacks before they are ended
_FIRST_WORD_S = 5.0  # how long to wait for a rank that has not begun to, on a machine with too much to do
_LEFTOVER_S = 0.3  # how long processes that a rank started may outlive it
_DEATH_NOTICE_S = 0.25  # a death without a report is seen later than the errors it causes in peers; dated back by this
_OUTPUT_LIMIT = 256 * 1024  # bytes of a rank's output that are kept, from its end
_WARM = (
    "pytest",
    "numba",
    "pydantic",
    "torch._dynamo",  # which the first torch optimizer of a process imports, for seconds
    "torch.distributed.device_mesh",
    "torch.utils.checkpoint",
    "trilithon.engine.build",
)


class Ending(Enum):
    """How a rank came to its end."""

    RETURNED = "returned"  # the body returned
    RAISED = "raised"  # the body raised, SystemExit included
    EXITED = "exited"  # the process exited before the body was over
    KILLED = "killed"  # a signal that the server did not send
    ENDED = "ended"  # by the server, after another rank had failed
    TIMED_OUT = "timed out"  # by the server, when the time was over


@dataclass(frozen=True, slots=True)
class Record:
    """A rank's end as the server saw it; `exit_code` is negative for a signal, as in `subprocess`."""

    ending: Ending
    exit_code: int
    output: str
    report: Report | None
    failed_at: float | None  # time.monotonic() of the failure; None for ranks that did not fail by themselves
    seconds: float  # from the fork to the end


@dataclass(eq=False, slots=True)
class _Rank:
    pid: int
    output: IO[bytes]
    report_file: IO[bytes]
    exit_code: int | None = None
    ended_as: Ending | None = None  # set when the server ends it
    seen_at: float = 0.0

    def send(self, number: int) -> None:
        if self.exit_code is None:
            os.kill(self.pid, number)

    def end(self, ending: Ending) -> None:
        if self.exit_code is None:
            self.ended_as = self.ended_as or ending
            os.kill(self.pid, signal.SIGKILL)

    def written(self) -> int:
        """Bytes of output so far; -1 once the process is over and has no more to say."""
        over = self.exit_code is not None or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return -1 if over else os.fstat(self.output.fileno()).st_size

    def report(self) -> Report | None:
        self.report_file.seek(0)
        data = self.report_file.read()
        try:
            report = pickle.loads(data) if data else None
        except (pickle.UnpicklingError, EOFError):  # ended while writing it
            return None
        return report if isinstance(report, Report) else None


@dataclass(eq=False, slots=True)
class _Running:
    """The processes of one job and the pipes between them and the server."""

    ranks: list[_Rank] = field(default_factory=list)
    reported: set[int] = field(default_factory=set)
    notices: int = -1
    release: int = -1

    def waiting(self) -> list[_Rank]:
        return [
            rank for number, rank in enumerate(self.ranks) if number not in self.reported and rank.exit_code is None
        ]

    def alive(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.exit_code is None]

    def failed(self) -> bool:
        for number, rank in enumerate(self.ranks):
            if rank.exit_code not in (None, 0) or (rank.exit_code == 0 and number not in self.reported):
                return True
            if number in self.reported:
                report = rank.report()
                if report is not None and report.error is not None:
                    return True
        return False

    def let_go(self) -> None:
        if self.release >= 0:
            os.close(self.release)
            self.release = -1

    def reap(self) -> None:
        """Collect ranks that are over, and end whatever a rank left running in its process group."""
        for rank in self.alive():
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid == 0:
                continue
            rank.seen_at = time.monotonic()
            rank.exit_code = os.waitstatus_to_exitcode(status)
            _end_group(rank.pid)


def serve(descriptor: int) -> None:
    """Answer jobs on an inherited socket until its other end closes. Called by the process that `ranks` starts."""
    torch.set_num_threads(1)
    for name in _WARM:
        with contextlib.suppress(Exception):  # whatever is wrong with a module, the rank that needs it will say
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what an interrupt means
    with Connection(descriptor) as caller:
        caller.send(("ready", _thread_count()))
        while True:
            try:
                job = caller.recv()
                caller.send(_run(job, caller, wake_read))
            except (EOFError, OSError):  # the caller is gone, or no process can be started
                return


def _thread_count() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return 1


def _run(job: Job, caller: Connection[Any, Any], wake: int) -> list[Record]:
    running = _Running()
    started = time.monotonic()
    store_pid = 0
    try:
        store_pid = _start(job, running, caller)
        _watch(job, running, caller, wake, started + job.timeout_s)
    finally:
        for rank in running.ranks:
            rank.end(Ending.ENDED)
        while running.alive():
            time.sleep(0.001)
            running.reap()
        running.let_go()
        if store_pid:
            os.kill(store_pid, signal.SIGKILL)
            os.waitpid(store_pid, 0)
        if running.notices >= 0:
            os.close(running.notices)
        records = [_record(rank, started) for rank in running.ranks]
        for rank in running.ranks:
            rank.output.close()
            rank.report_file.close()
    return records


def _start(job: Job, running: _Running, caller: Connection[Any, Any]) -> int:
    """Fork the store and the ranks; returns the pid of the store."""
    server_pid = os.getpid()
    running.notices, notice = os.pipe()
    release, running.release = os.pipe()
    with socket.create_server(("127.0.0.1", 0), backlog=4 * job.world_size + 8) as listener:
        port = listener.getsockname()[1]
        store_pid = os.fork()
        if store_pid == 0:
            _host_store(listener, port, running, caller, server_pid)
        for number in range(job.world_size):
            output, report = _nameless_file(), _nameless_file()
            pid = os.fork()
            if pid == 0:
                for descriptor in (listener.detach(), caller.fileno(), running.notices, running.release):
                    os.close(descriptor)
                run_rank(job, number, port, Streams(output.fileno(), report.fileno(), notice, release), server_pid)
            with contextlib.suppress(OSError):  # the rank does the same; whoever comes first
                os.setpgid(pid, pid)
            running.ranks.append(_Rank(pid, output, report))
    os.close(notice)
    os.close(release)
    return store_pid


def _nameless_file() -> IO[bytes]:
    """A file that nothing has to clean up."""
    descriptor, path = tempfile.mkstemp(prefix="trilithon-rank-")
    os.unlink(path)
    return os.fdopen(descriptor, "w+b")


def _host_store(listener: socket.socket, port: int, running: _Running, caller: Any, server_pid: int) -> None:
    """Serve the rendezvous store until ended; runs in a process of its own."""
    try:
        end_with_parent(server_pid)
        for descriptor in (caller.fileno(), running.notices, running.release):
            os.close(descriptor)
        signal.set_wakeup_fd(-1)
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        while store.port == port:
            time.sleep(3600)
    finally:
        os._exit(1)


def _watch(job: Job, running: _Running, caller: Connection[Any, Any], wake: int, deadline: float) -> None:
    """Wait until every rank is over, one has failed and the others have been ended, or the time is over."""
    ends_at, ending, one_failed = deadline, Ending.TIMED_OUT, False
    while True:
        running.reap()
        if not running.waiting():
            running.let_go()
        if not running.alive():
            return
        now = time.monotonic()
        if job.end_on_failure and not one_failed and now < deadline and running.failed():
            ends_at, ending, one_failed = min(deadline, now + _GRACE_S), Ending.ENDED, True
        if now >= ends_at:
            _stop(running.waiting() or running.alive(), ending)
            ends_at = time.monotonic() + _GRACE_S  # ranks that have reported end by themselves once released
        else:
            _wait(running, caller, wake, ends_at - now)


def _wait(running: _Running, caller: Connection[Any, Any], wake: int, limit_s: float) -> None:
    """Until a rank reports, a process ends, or `limit_s` is over."""
    ready, _, _ = select.select([caller.fileno(), running.notices, wake], [], [], limit_s)
    if caller.fileno() in ready:
        raise EOFError  # nothing is sent while a job runs, so the caller closed its end
    if running.notices in ready:
        data = os.read(running.notices, 4096)
        running.reported.update(int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4))
        if not data:  # every rank closed it: only their ends are left to come
            time.sleep(0.001)
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)


def _stop(ranks: Sequence[_Rank], ending: Ending) -> None:
    """Ask for the stacks, continue whoever was stopped so that the answer can come, then end them."""
    silent = [rank.written() for rank in ranks]
    for rank in ranks:
        rank.send(DUMP_SIGNAL)
        rank.send(signal.SIGCONT)
    if ranks:
        time.sleep(_DUMP_S)
    ends_at = time.monotonic() + _FIRST_WORD_S - _DUMP_S
    while time.monotonic() < ends_at and any(0 <= rank.written() == size for rank, size in zip(ranks, silent)):
        time.sleep(0.05)
    for rank in ranks:
        rank.end(ending)


def _end_group(leader: int) -> None:
    """End what a rank left running. While any of it is, the leader's number cannot be given to another process.

    It gets a moment to end by itself: Python's resource tracker is among it, which removes shared memory that a rank
    made and could not unlink.
    """
    ends_at = time.monotonic() + _LEFTOVER_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < ends_at:
            os.killpg(leader, 0)  # raises once nobody is left
            time.sleep(0.002)
        os.killpg(leader, signal.SIGKILL)


def _record(rank: _Rank, started: float) -> Record:
    report = rank.report()
    exit_code = rank.exit_code if rank.exit_code is not None else -signal.SIGKILL
    failed_at = None
    if report is not None and report.error is not None:
        ending, failed_at = Ending.RAISED, report.at
    elif report is not None and (exit_code == 0 or rank.ended_as is not None):
        ending = Ending.RETURNED
    elif rank.ended_as is not None:
        ending = rank.ended_as
    else:
        ending = Ending.KILLED if exit_code < 0 else Ending.EXITED
        failed_at = rank.seen_at - _DEATH_NOTICE_S
    size = rank.output.seek(0, os.SEEK_END)
    rank.output.seek(max(0, size - _OUTPUT_LIMIT))
    output = rank.output.read().decode("utf-8", errors="replace")
    return Record(ending, exit_code, output, report, failed_at, rank.seen_at - started)
