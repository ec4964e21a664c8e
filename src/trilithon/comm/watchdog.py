"""The watchdog: when ranks wait for each other in vain, say who is missing, where and why, and end every process.

Each wait of a `Group` is bracketed by `enter` and `leave`. One daemon thread per watchdog looks a few times a second,
over its own connection to the rendezvous store, and raises the alarm when a wait exceeds the limit or when something
certain happened earlier: an exception on a rank, a program that ended, calls that differ. Every rank then answers with
its state, one rank prints one table (see `diagnosis`), and the processes end with `EXIT_STATUS`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import util as process_exit
from types import TracebackType
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from trilithon.comm.alarm import Alarm
from trilithon.comm.diagnosis import first_mismatch, table
from trilithon.comm.journal import Call, Journal
from trilithon.comm.rank_state import RankState, Status, group_state, main_thread_line, raised_line
from trilithon.contracts import Tag

EXIT_STATUS = 75
"""Exit status of a process that the watchdog ended (EX_TEMPFAIL: the run may be started again)."""

_IDLE_TICK_S, _WAITING_TICK_S = 1.0, 0.25
_SUSPECT_S = 1.0  # a wait longer than this makes the thread look at the other ranks' calls
_GRACE_S = 2.5  # for the answers of the other ranks
_PRINT_S = 4.0  # for the table to appear
_AFTER_S = 0.5  # between the end of the rank that raised and the others'


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective that a thread of this rank waits for, or that a stream still has to finish."""

    kind: str
    group: str
    tag: Tag
    sequence: int
    since: float  # time.monotonic()
    completed: Callable[[], bool] | None = None  # for work that nobody blocks on


class Watchdog:
    """Watches the waits of this rank. Inert for one rank or without a store.

    `store`: the rendezvous store (torch.distributed), cloned here so that blocking calls of others do not matter.
    Every rank makes its watchdogs in the same order. `report_failure` tells the others about an exception at once; for
    uncaught exceptions and for programs that end this happens by itself.
    """

    _made = 0

    def __init__(
        self,
        wait_limit_s: float,
        store: Any,
        rank: int,
        world_size: int,
        *,
        end_process: Callable[[int], Any] = os._exit,
    ) -> None:
        self.wait_limit_s = wait_limit_s
        self.rank = rank
        self.world_size = world_size
        self._waits: dict[int, Wait] = {}
        self._streamed: list[Wait] = []
        self._journals: weakref.WeakValueDictionary[str, Journal] = weakref.WeakValueDictionary()
        self._named: Counter[str] = Counter()
        self._failure: RankState | None = None  # set once this rank raised or its program ends
        self._shown: Wait | None = None  # the wait for which this rank showed its calls
        self._lost = ""  # what the transport said when it lost a peer
        self._end_process = end_process
        self._thread: threading.Thread | None = None
        self._closed = False
        self._wake, self._printed, self._peer_ended = threading.Event(), threading.Event(), threading.Event()
        self._alarm: Alarm | None = None
        self._own: Alarm | None = None  # the main thread's connection
        if world_size > 1 and store is not None:
            space = f"trilithon/watchdog/{Watchdog._made}"
            self._alarm, self._own = (Alarm(PrefixStore(space, store.clone()), rank, world_size) for _ in range(2))
            _watch_the_exits(self)
        Watchdog._made += 1

    def follow(self, journal: Journal) -> str:
        """Include a group's calls in what ranks compare, while the journal lives; returns the name for its waits.

        The second group of a name becomes "name#2", on every rank alike as long as they make them in the same order.
        """
        self._named[journal.name] += 1
        again = self._named[journal.name]
        name = journal.name if again == 1 else f"{journal.name}#{again}"
        self._journals[name] = journal
        if self._alarm is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trilithon-watchdog", daemon=True)
            self._thread.start()
        return name

    def enter(self, kind: str, group: str, tag: Tag, sequence: int = -1) -> None:
        """This thread begins to wait."""
        self._waits[threading.get_ident()] = Wait(kind, group, tag, sequence, time.monotonic())

    def leave(self) -> None:
        """This thread's wait is over."""
        self._waits.pop(threading.get_ident(), None)

    def enter_streamed(self, kind: str, group: str, tag: Tag, sequence: int, completed: Callable[[], bool]) -> None:
        """Work that a stream waits for without blocking a thread; forgotten once `completed()`."""
        self._streamed = [wait for wait in self._streamed if wait.completed is not None and not wait.completed()]
        self._streamed.append(Wait(kind, group, tag, sequence, time.monotonic(), completed))

    def connection_lost(self, group: str, call: Call, peer: int, said: str) -> None:
        """The transport lost global rank `peer` during `call`: raise the alarm; returns if no table was printed."""
        if self._own is None or self._closed:
            return
        self._lost = f"to rank {peer}: {said}"
        self._peer_ended.set()
        waiting = Wait(call.kind, group, call.tag, call.sequence, time.monotonic())
        self._waits[threading.get_ident()] = waiting
        try:
            self._own.sound(f"rank {self.rank} lost its connection to rank {peer} in {call.signature}")
        except RuntimeError:
            self._report_alone(f"rank {self.rank} lost its connection to rank {peer} in {call.signature}", peer)
        self._wake.set()
        time.sleep(_GRACE_S + 2 * _PRINT_S)
        self.leave()

    def report_failure(self, error: BaseException) -> None:
        """Tell every rank that this one failed with `error`, and return once the table is printed (or after seconds).

        The process then ends by the exception itself; the other ranks end with `EXIT_STATUS`.
        """
        if self._own is None or self._closed or self._failure is not None:
            return
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".removesuffix(": ")
        self._failure = replace(self._state(), status=Status.RAISED, error=text, where=raised_line(error))
        try:
            self._own.sound(f"rank {self.rank} raised {text}")
        except RuntimeError:
            return
        self._wake.set()
        self._printed.wait(_GRACE_S + _PRINT_S)

    @property
    def hopeless(self) -> bool:
        """This rank has failed, or has lost a peer: no step of it can end any more."""
        return self._failure is not None or self._peer_ended.is_set()

    def close(self) -> None:
        """Stop watching; ranks that still wait for this one learn that it has ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._own is not None and self._failure is None:
            with suppress(RuntimeError):  # the store's host may have ended already
                self._own.leave(replace(self._state(), status=Status.LEFT, where=""))
        self._stop_thread()
        self._waits.clear()
        self._streamed.clear()
        self._journals.clear()

    def _stop_thread(self) -> None:
        """A thread still inside a call of the store when the interpreter goes away would end the process by SIGABRT."""
        self._closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def program_ends(self) -> None:
        """Called when the interpreter exits: an error in flight is reported, and otherwise that this rank left.

        Rank 0, whose process may host the store, stays a moment for ranks that still wait.
        """
        self._tell_of_the_end()
        self._stop_thread()

    def _tell_of_the_end(self) -> None:
        if self._own is None or self._closed or self._failure is not None:
            return
        error = _error_in_flight()
        if error is not None:
            self.report_failure(error)
            return
        self._failure = replace(self._state(), status=Status.LEFT, where="")
        try:
            self._own.leave(self._failure)
            deadline = time.monotonic() + _PRINT_S
            while self.rank == 0 and not self._own.everyone_left() and time.monotonic() < deadline:
                if self._own.headline() is not None:
                    self._printed.wait(_GRACE_S + _PRINT_S)
                    return
                time.sleep(0.05)
        except RuntimeError:
            return

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(_WAITING_TICK_S if self._oldest() is not None else _IDLE_TICK_S)
            self._wake.clear()
            if self._closed:
                return
            try:
                if self._look():
                    return
            except RuntimeError:
                # The store's host has ended. That is the normal end of a run, unless this rank still waits.
                wait = self._oldest()
                if wait is not None and time.monotonic() - wait.since > min(self.wait_limit_s, _SUSPECT_S):
                    self._report_alone(f"rank {self.rank} waits and the rendezvous store is gone")
                    return

    def _look(self) -> bool:
        """One look around; True when the alarm was raised and dealt with."""
        assert self._alarm is not None
        wait = self._oldest()
        if wait is not None:
            waited_s = time.monotonic() - wait.since
            about = f"rank {self.rank} waited {waited_s:.1f} s in {wait.kind} for module {wait.tag.module}"
            if waited_s > self.wait_limit_s:
                self._alarm.sound(f"{about} (comm.wait_limit_s is {self.wait_limit_s:g})")
            elif waited_s > _SUSPECT_S:
                certain = self._certain_trouble(wait)
                if certain:
                    self._alarm.sound(f"{about} while {certain}")
        headline = self._alarm.headline()
        if headline is None:
            return False
        self._report(headline)
        return True

    def _certain_trouble(self, wait: Wait) -> str:
        """Something that makes this wait hopeless before the limit: a peer has ended, or calls already differ."""
        assert self._alarm is not None
        journal = self._journals.get(wait.group)
        peers = [rank for rank in (journal.ranks if journal is not None else ()) if rank != self.rank]
        if not peers:
            return ""
        mine = self._state()
        for left in self._alarm.left(peers):
            theirs = left.groups.get(wait.group)
            if theirs is None or not any(call.sequence >= wait.sequence for call in theirs.calls):
                return f"rank {left.rank} has ended"
        leader = min([self.rank, *peers])
        if leader == self.rank:
            if self._shown is not wait:
                self._alarm.show_calls(mine)
                self._shown = wait
            return ""
        theirs_shown = self._alarm.calls_of(leader)
        if theirs_shown is not None and first_mismatch([theirs_shown, mine]) is not None:
            return f"rank {leader} called something else"
        return ""

    def _report(self, headline: str) -> None:
        """Exchange states, print the table on one rank, and end this process unless it ends by itself."""
        assert self._alarm is not None
        try:
            self._alarm.answer(self._failure or self._state())
            states = self._alarm.collect(_GRACE_S)
            if self._alarm.elect(states):
                text = table(states, headline)
                _print(text)
                self._alarm.announce(text)
                gone = sum(state.status in (Status.GONE, Status.LEFT) for state in states)
                self._alarm.wait_seen(self.world_size - 1 - gone, 1.5)
            elif not self._alarm.wait_printed(_PRINT_S):
                _print(table(states, headline))
        except RuntimeError:
            self._report_alone(headline)
            return
        self._printed.set()
        if any(state.status is Status.RAISED for state in states) and self._failure is None:
            # Launchers blame the process that ends first: let it be the one that raised. A broken connection shows it.
            if self._oldest() is not None:
                self._peer_ended.wait(_PRINT_S)
            time.sleep(_AFTER_S)
        self._finish()

    def _report_alone(self, headline: str, lost: int = -1) -> None:
        """The store is gone, and with it the other ranks' answers; `lost` is a rank known to have ended."""
        states = [RankState(rank, Status.GONE if rank == lost else Status.UNKNOWN) for rank in range(self.world_size)]
        states[self.rank] = self._failure or self._state()
        _print(table(states, f"{headline}; the rendezvous store is gone, so only this rank is known"))
        self._printed.set()
        self._finish()

    def _finish(self) -> None:
        if self._failure is not None and self._failure.status is Status.RAISED:
            return  # the main thread is on its way out with its exception
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._end_process(EXIT_STATUS)

    def _oldest(self) -> Wait | None:
        streamed = [wait for wait in list(self._streamed) if wait.completed is not None and not wait.completed()]
        return min([*list(self._waits.values()), *streamed], key=lambda wait: wait.since, default=None)

    def _state(self) -> RankState:
        wait = self._oldest()
        groups = {name: group_state(journal) for name, journal in list(self._journals.items())}
        line = main_thread_line()
        if wait is None:
            return RankState(self.rank, Status.OUTSIDE, where=line, error=self._lost, groups=groups)
        waited_s = time.monotonic() - wait.since
        return RankState(
            self.rank, Status.WAITING, wait.group, wait.sequence, waited_s, line, error=self._lost, groups=groups
        )


def _print(text: str) -> None:
    sys.stderr.write(f"\n{text}\n")
    sys.stderr.flush()


_open: weakref.WeakSet[Watchdog] = weakref.WeakSet()
_hooked = False


def _watch_the_exits(watchdog: Watchdog) -> None:
    """Tell the others when this program raises or ends, by whichever way."""
    global _hooked
    _open.add(watchdog)
    if _hooked:
        return
    _hooked = True
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        for open_one in list(_open):
            open_one.report_failure(error)

    sys.excepthook = report
    atexit.register(_programs_end)
    process_exit.Finalize(None, _programs_end, exitpriority=0)  # a forked child of multiprocessing skips atexit


def _programs_end() -> None:
    for open_one in list(_open):
        open_one.program_ends()


def _error_in_flight() -> BaseException | None:
    """The exception with which a child of multiprocessing ends: it does not pass through sys.excepthook."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code not in (0, None) else None
    return error
