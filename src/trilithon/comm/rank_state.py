"""What one rank tells the others when the alarm is raised: where it is and what it called last."""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import Any

import torch

from trilithon.comm.journal import Journal


class Status(StrEnum):
    """Where a rank is, as far as its collectives are concerned."""

    WAITING = "waiting"  # inside a collective
    OUTSIDE = "outside"  # running, between collectives
    RAISED = "raised"  # an exception ends it
    LEFT = "left"  # its program ended
    GONE = "gone"  # no answer although it could have given one
    UNKNOWN = "unknown"  # could not be asked


@dataclass(frozen=True, slots=True)
class CallState:
    """One entry of a rank's journal in transportable form."""

    sequence: int
    kind: str
    signature: str
    module: str
    parameters: list[str]
    step: int
    micro_step: int


@dataclass(frozen=True, slots=True)
class GroupState:
    """The journal of one group on one rank."""

    ranks: list[int]
    calls: list[CallState]  # oldest first


@dataclass(frozen=True, slots=True)
class RankState:
    """The answer of one rank to the alarm."""

    rank: int
    status: Status
    waits_in: str = ""  # group
    waits_at: int = -1  # sequence in that group
    waited_s: float = 0.0
    where: str = ""  # the innermost line of the user's program
    error: str = ""  # exception of a rank that raised, or what the transport said
    groups: dict[str, GroupState] = field(default_factory=dict)
    host: str = field(default_factory=socket.gethostname)
    process_id: int = field(default_factory=os.getpid)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> RankState:
        raw: dict[str, Any] = json.loads(text)
        groups = {
            name: GroupState(group["ranks"], [CallState(**call) for call in group["calls"]])
            for name, group in raw.pop("groups").items()
        }
        return RankState(**{**raw, "status": Status(raw["status"]), "groups": groups})

    def lives_here(self) -> bool:
        """Its process exists on this host and has not been reaped."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.process_id, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def waiting_call(self) -> CallState | None:
        """The call this rank is blocked in, when its journal still has it."""
        calls = self.groups[self.waits_in].calls if self.waits_in in self.groups else []
        return next((call for call in calls if call.sequence == self.waits_at), None)


def group_state(journal: Journal) -> GroupState:
    """A snapshot; safe while another thread issues calls."""
    calls = list(journal.calls)
    return GroupState(list(journal.ranks), [CallState(**call.as_json()) for call in calls])


def main_thread_line() -> str:
    """`file:line in function` of the user's program in the main thread; empty when it cannot be told."""
    frame = sys._current_frames().get(threading.main_thread().ident or -1)

    def outward() -> Iterator[tuple[CodeType, int]]:
        current = frame
        while current is not None:
            yield current.f_code, current.f_lineno
            current = current.f_back

    return _innermost_user_line(outward())


def raised_line(error: BaseException) -> str:
    """`file:line in function` of the user's program in which `error` was raised."""
    inward = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    return _innermost_user_line(iter(reversed(inward)))


_NOT_THE_USERS = tuple(
    str(Path(folder))
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    )
)


def _innermost_user_line(frames: Iterator[tuple[CodeType, int]]) -> str:
    first = ""
    for code, line in frames:
        here = f"{Path(code.co_filename).name}:{line} in {code.co_name}"
        first = first or here
        if not code.co_filename.startswith((*_NOT_THE_USERS, "<frozen")):
            return here
    return first
