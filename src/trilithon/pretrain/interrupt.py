"""Ctrl-C as a request: the run stops at the end of a step instead of in the middle of a collective.

SIGTERM keeps its meaning and ends a process at once: it is what ranks get when another one has failed, and then no step
of theirs can end.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_PATIENCE_S = 1.0  # one Ctrl-C may reach a process twice, from the terminal and from whoever started it


class StopRequest:
    """While entered, the first SIGINT is noted; a second one a while later ends the process at once."""

    def __init__(self) -> None:
        self.signal = 0  # its number, 0 while nobody asked
        self._noted_at = 0.0
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signal:
            self.signal, self._noted_at = number, now
        elif now - self._noted_at > _PATIENCE_S:
            os._exit(128 + number)
