"""The processes of one node: start them, see who failed first, end all of them, leave nothing behind.

Each process leads its own session, so that a signal reaches what it started too (data-loader workers). A leader is
looked at without being reaped until its group has been ended: its process id cannot pass to someone else meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trilithon.errors import LaunchError

STUCK_AFTER_S = 3.0  # a rank that wrote down its failure and still lives this much later is taken for failed


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's end. `exit_status` is as a shell shows it: 128 + n for signal n."""

    local_rank: int
    pid: int
    exit_status: int
    signal_name: str | None
    traceback: str
    left: tuple[int, ...] = ()  # local ranks that had ended with status 0 by then


class NodeProcesses:
    """Started processes, in order of local rank.

    `records[i]` is where process i writes down its failure (see child.py). Linux and macOS.
    """

    def __init__(self, pids: Mapping[int, subprocess.Popen[bytes]], records: Sequence[Path]) -> None:
        self._processes = dict(pids)
        self._records = list(records)
        self._exits: dict[int, int] = {}  # local rank -> exit status, seen but perhaps not reaped
        self._killed: set[int] = set()  # local ranks that ended by a signal
        self.hurry = False  # set by a second signal: no more waiting for a graceful end

    @classmethod
    def start(
        cls, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], records: Sequence[Path]
    ) -> NodeProcesses:
        """Start one process per command; its whole environment is given. Raises LaunchError if one cannot start."""
        started: dict[int, subprocess.Popen[bytes]] = {}
        for local_rank, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            try:
                started[local_rank] = subprocess.Popen(command, env=dict(environment), start_new_session=True)
            except OSError as error:
                cls(started, records).end(signal.SIGTERM, grace_s=1.0)
                raise LaunchError(f"{command[0]} could not be started: {error.strerror}. Check the command.") from error
            except BaseException:  # a signal between two starts
                cls(started, records).end(signal.SIGTERM, grace_s=1.0)
                raise
        return cls(started, records)

    @property
    def pids(self) -> dict[int, int]:
        return {local_rank: process.pid for local_rank, process in self._processes.items()}

    def finished(self) -> bool:
        """True when every process has ended, well or not."""
        self._look()
        return len(self._exits) == len(self._processes)

    def first_failure(self) -> Failure | None:
        """The failure that came first among those seen so far; None while all is well.

        A rank that ended without a record was killed or ended at once, while the others' exceptions usually follow
        from its absence: it counts as first. Among the others the time of the record decides, also where the rank that
        failed first takes longer to end than one that followed.
        """
        self._look()
        failed = {rank: status for rank, status in self._exits.items() if status != 0}
        if not failed and not self._stuck():
            return None
        notes = {rank: self._note(rank) for rank in self._processes}
        for rank, note in notes.items():
            if rank not in self._exits and note:
                failed[rank] = _number(note, "exit_status") or 1
        first = min(failed, key=lambda rank: (_number(notes[rank], "time_ns"), rank))
        status = failed[first]
        return Failure(
            local_rank=first,
            pid=self._processes[first].pid,
            exit_status=status,
            signal_name=signal.Signals(status - 128).name if first in self._killed else None,
            traceback=str(notes[first].get("traceback", "")),
            left=tuple(sorted(rank for rank, ended in self._exits.items() if ended == 0)),
        )

    def end(self, first_signal: signal.Signals, grace_s: float) -> None:
        """End every process and what it started: the signal, then SIGTERM, then SIGKILL at `grace_s`. Idempotent.

        SIGINT cannot reach a rank that waits inside a collective, so SIGTERM follows after 40 % of the time.
        """
        if not self._processes:
            return
        self._signal_groups(first_signal)
        start = time.monotonic()
        softened = first_signal == signal.SIGTERM
        while not self.finished() and not self.hurry and (waited := time.monotonic() - start) < grace_s:
            if not softened and waited > 0.4 * grace_s:
                self._signal_groups(signal.SIGTERM)
                softened = True
            time.sleep(0.02)
        self._signal_groups(signal.SIGKILL)
        for process in self._processes.values():
            try:
                process.wait(timeout=3.0)
            except subprocess.TimeoutExpired:  # uninterruptible sleep in a driver: nothing more can be done
                continue
        self._processes = {}

    def reap(self) -> None:
        """After all processes ended well: collect them, leaving what they detached alone."""
        for process in self._processes.values():
            process.wait()
        self._processes = {}

    def _signal_groups(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.returncode is None:  # not reaped, so the group is still this process's
                try:
                    os.killpg(process.pid, number)
                except (ProcessLookupError, PermissionError):
                    continue

    def _look(self) -> None:
        for local_rank, process in self._processes.items():
            if local_rank not in self._exits:
                seen = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if seen is not None:
                    self._exits[local_rank] = seen.si_status
                    if seen.si_code != os.CLD_EXITED:
                        self._exits[local_rank] += 128
                        self._killed.add(local_rank)

    def _stuck(self) -> bool:
        """Whether a rank wrote down its failure long ago and still has not ended."""
        now = time.time()
        for local_rank in self._processes.keys() - self._exits.keys():
            try:
                if now - self._records[local_rank].stat().st_mtime > STUCK_AFTER_S and self._note(local_rank):
                    return True
            except OSError:
                continue
        return False

    def _note(self, local_rank: int) -> dict[str, object]:
        try:
            note = json.loads(self._records[local_rank].read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return note if isinstance(note, dict) else {}


def _number(note: Mapping[str, object], name: str) -> int:
    value = note.get(name, 0)
    return value if isinstance(value, int) else 0
