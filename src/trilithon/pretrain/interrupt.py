"""Signals as requests: a run stops, or saves, at the end of a step instead of in the middle of a collective.

| signal | what it asks for |
| --- | --- |
| SIGINT (Ctrl-C) | stop after this step; a second one ends the process at once |
| SIGTERM | the same, and the step must end soon: who sends it will not wait for long |
| SIGUSR1 | save after this step and go on |

A thread of its own sees each signal when it arrives, because Python runs a handler only between two instructions and a
rank that waits in a collective may not get there: the second Ctrl-C and the end of the patience after SIGTERM work then
as well. SIGTERM is also what ranks get when another one has failed; then their step never ends, and once that is known
they end at once.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_PATIENCE_S = 1.0  # one Ctrl-C may reach a process twice, from the terminal and from whoever started it
_STEP_S = 10.0  # a step in progress has this long after SIGTERM, and three times the longest one so far
_LOOK_S = 0.05  # between two looks at whether that is over
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, notes what signals ask for. Without `on_termination` only SIGINT is taken.

    `signal` is the number of the first signal that asked to stop, 0 while none did.
    """

    def __init__(self, *, on_termination: bool = True, hopeless: Callable[[], bool] = bool) -> None:
        """hopeless: whether no step can end any more, as far as is known; then SIGTERM ends the process at once."""
        self.signal = 0
        self._hopeless = hopeless
        self._save = False
        self._wanted = (*_STOPPING, signal.SIGUSR1) if on_termination else (signal.SIGINT,)
        self._longest_step_s = 0.0
        self._at_boundary = threading.Event()
        self._noted = _Noted()
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._sockets = socket.socketpair()
            for end in self._sockets:
                end.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(self._sockets[1].fileno(), warn_on_full_buffer=False)
            self._before = {int(number): signal.signal(number, self._handle) for number in self._wanted}
            self._thread = threading.Thread(target=self._listen, name="trilithon-signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._at_boundary.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._sockets is not None and self._thread is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self._sockets[1].send(b"\0")  # no signal has this number: the thread ends
            self._thread.join()
            for end in self._sockets:
                end.close()

    def take_save(self) -> bool:
        """Whether saving was asked for since the last call."""
        asked, self._save = self._save, False
        return asked

    def step_took(self, seconds: float) -> None:
        """A step ended: how long one takes decides how long SIGTERM waits for the next."""
        self._longest_step_s = max(self._longest_step_s, seconds)

    def at_boundary(self) -> None:
        """The step in progress has ended and the request is being met: nothing is cut short any more."""
        self._at_boundary.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._take(number, self._noted)

    def _take(self, number: int, noted: _Noted) -> None:
        """What one signal means. The handler and the thread both come here, each with its own count of signals."""
        if number == signal.SIGUSR1:
            if noted is self._noted:
                self._save = True
            return
        if not self.signal:
            self.signal = number
        if noted.second(time.monotonic()):
            os._exit(128 + number)

    def _listen(self) -> None:
        assert self._sockets is not None
        listening, noted, deadline = self._sockets[0], _Noted(), None
        while True:
            ready, _, _ = select.select([listening], [], [], None if deadline is None else _LOOK_S)
            if deadline is not None and self._at_boundary.is_set():
                deadline = None
            if deadline is not None and self._hopeless():  # another rank's failure is being told: this one's end is not
                os._exit(128 + signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                _end_unsaved(signal.SIGTERM)
            if not ready:
                continue
            for number in listening.recv(64):
                if number == 0:
                    return
                if number in self._wanted:
                    self._take(number, noted)
                if number == signal.SIGTERM and deadline is None:
                    deadline = time.monotonic() + _STEP_S + 3 * self._longest_step_s


class SaveRequest:
    """A file by which whoever started the ranks passes SIGUSR1 on: it appears, and the rank that looks removes it."""

    VARIABLE = "TRILITHON_TRAIN_SAVE_REQUEST"

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def from_environment(cls) -> SaveRequest:
        """The one that the launcher has named; without a launcher there is none, and `take` is always false."""
        path = os.environ.get(cls.VARIABLE)
        return cls(Path(path) if path else None)

    def make(self) -> None:
        if self.path is not None:
            self.path.touch()

    def take(self) -> bool:
        """Whether it was made since the last call."""
        if self.path is None or not self.path.exists():
            return False
        self.path.unlink(missing_ok=True)
        return True


class _Noted:
    """When the first of several signals came."""

    def __init__(self) -> None:
        self._at: float | None = None

    def second(self, now: float) -> bool:
        """True for a signal that comes a while after the first."""
        if self._at is None:
            self._at = now
            return False
        return now - self._at > _PATIENCE_S


def _end_unsaved(number: signal.Signals) -> None:
    rank = os.environ.get("RANK", "0")
    text = f"trilithon: rank {rank} could not end its step after {number.name}; it ends without saving.\n"
    sys.stderr.write(text)
    sys.stderr.flush()
    os._exit(128 + number)
