"""Saving while training goes on: one thread, one save at a time, and no failure that nobody hears of.

The thread is not a daemon, so a program that ends first writes out what it has begun.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from trilithon.checkpoint.agreement import Coordinator
from trilithon.checkpoint.report import SaveProgress, SaveReport
from trilithon.checkpoint.retention import Retention
from trilithon.checkpoint.save import Copies, Prepared, complete, take_copies

logger = logging.getLogger(__name__)


class Background:
    """At most one save under way. `wait` and `collect` raise what it failed with, once."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._prepared: Prepared | None = None
        self._error: BaseException | None = None
        self._copies: Copies = {}  # their memory stays for the next save in the background
        self.last: SaveReport | None = None
        _LIVING.add(self)

    def run(
        self, prepared: Prepared, ranks: Coordinator, retention: Retention, begun: float, notes: tuple[str, ...]
    ) -> Path:
        """Write now, on this thread."""
        path = complete(prepared, ranks, retention)
        now = time.monotonic() - begun
        self.last = SaveReport(path, prepared.contents.step, prepared.total_bytes, now, now, notes)
        return path

    def start(
        self, prepared: Prepared, ranks: Coordinator, retention: Retention, begun: float, notes: tuple[str, ...]
    ) -> Path:
        """Copy what is to be written, and write it on a thread; `ranks` is used by that thread alone."""
        assert self._thread is None, "the save before was not waited for"
        self._copies = take_copies(prepared, self._copies)
        blocked_s, step = time.monotonic() - begun, prepared.contents.step

        def work() -> None:
            try:
                path = complete(prepared, ranks, retention)
                seconds = time.monotonic() - begun
                self.last = SaveReport(path, step, prepared.total_bytes, seconds, blocked_s, notes)
            except BaseException as error:
                self._error = error

        self._prepared = prepared
        self._thread = threading.Thread(target=work, name="trilithon-save", daemon=False)
        self._thread.start()
        return prepared.path

    @property
    def progress(self) -> SaveProgress | None:
        prepared, thread = self._prepared, self._thread
        if prepared is None or thread is None or not thread.is_alive():
            return None
        return SaveProgress(prepared.path, prepared.written, prepared.own_bytes)

    @property
    def ended(self) -> bool:
        """A save was started, and its thread is done; `collect` has not been called since."""
        return self._thread is not None and not self._thread.is_alive()

    def collect(self) -> None:
        """Wait for the save under way, if there is one, and raise what it failed with."""
        if self._thread is not None:
            self._thread.join()
        self._thread = self._prepared = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """As `collect`, and the memory of the copies goes."""
        try:
            self.collect()
        finally:
            self._copies.clear()

    def complain(self) -> None:
        """At the end of the program: a failure that nobody collected is logged."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            logger.error("the last checkpoint was not saved: %s", self._error)
            self._error = None


_LIVING: weakref.WeakSet[Background] = weakref.WeakSet()


def _at_exit(living: Callable[[], list[Background]]) -> None:
    for background in living():
        background.complain()


atexit.register(_at_exit, lambda: list(_LIVING))
