"""Keeps note of what this rank waits for. (The thread that tells the other ranks follows in the next commit.)"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from torch.distributed import Store as TorchStore

from trilithon.comm.journal import Call, Journal
from trilithon.contracts import Tag


@dataclass(frozen=True, slots=True)
class Wait:
    """A thread of this rank is blocked in a collective."""

    kind: str
    group: str
    tag: Tag
    sequence: int
    since: float  # time.monotonic()


class Watchdog:
    """Bookkeeping of waits on this rank."""

    def __init__(self, wait_limit_s: float, store: TorchStore | None, rank: int, world_size: int) -> None:
        self.wait_limit_s = wait_limit_s
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._waits: dict[int, Wait] = {}
        self._journals: list[Journal] = []

    def follow(self, journal: Journal) -> None:
        """Include a group's calls in what is compared between ranks."""
        self._journals.append(journal)

    def enter(self, kind: str, group: str, tag: Tag, sequence: int = -1) -> None:
        """This thread begins to wait."""
        self._waits[threading.get_ident()] = Wait(kind, group, tag, sequence, time.monotonic())

    def leave(self) -> None:
        """This thread's wait is over."""
        self._waits.pop(threading.get_ident(), None)

    def connection_lost(self, group: str, call: Call, error: BaseException) -> None:
        """The transport reported an error while this rank waited."""

    def close(self) -> None:
        """Forget everything."""
        self._waits.clear()
        self._journals.clear()
