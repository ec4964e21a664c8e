"""How ranks tell each other about trouble: a few keys in the rendezvous store, beside the process groups.

The store answers as long as its host lives, whatever state the collectives are in. Every method may raise RuntimeError
when the host is gone; the watchdog then reports what this rank knows by itself.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from trilithon.comm.rank_state import RankState, Status

_STORE_TIMEOUT_S = 5.0
_POLL_S = 0.05


class Alarm:
    """The alarm of one watchdog over all ranks. Keys: alarm, state/R, reporter, printed, seen, left/R, someone_left."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        """`store`: a torch.distributed store that no other thread uses (a clone)."""
        self._store = store
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._rank = rank
        self._world_size = world_size

    def sound(self, headline: str) -> None:
        """Raise the alarm; the first headline stays."""
        self._store.compare_set("alarm", "", headline)

    def headline(self) -> str | None:
        """Why the alarm was raised; None while it is not."""
        return self._read("alarm")

    def leave(self, state: RankState) -> None:
        """This rank's program ends."""
        self._store.set(f"left/{self._rank}", state.to_json())
        self._store.set("someone_left", "yes")

    def left(self, ranks: list[int]) -> list[RankState]:
        """Those of `ranks` whose program has ended. One look when nobody has left."""
        if not self._store.check(["someone_left"]):
            return []
        found = (self._read(f"left/{rank}") for rank in ranks)
        return [RankState.from_json(text) for text in found if text is not None]

    def everyone_left(self) -> bool:
        """Every rank's program has ended."""
        return len(self.left(list(range(self._world_size)))) == self._world_size

    def show_calls(self, state: RankState) -> None:
        """Let others compare their calls with this rank's."""
        self._store.set(f"calls/{self._rank}", state.to_json())

    def calls_of(self, rank: int) -> RankState | None:
        """What `rank` showed last."""
        text = self._read(f"calls/{rank}")
        return None if text is None else RankState.from_json(text)

    def answer(self, state: RankState) -> None:
        """Publish where this rank is."""
        self._store.set(f"state/{self._rank}", state.to_json())

    def collect(self, grace_s: float) -> list[RankState]:
        """The answers of all ranks in rank order; `LEFT` or `GONE` for those that did not answer within `grace_s`."""
        deadline = time.monotonic() + grace_s
        found: dict[int, RankState] = {}
        while True:
            for rank in range(self._world_size):
                if rank not in found and (text := self._read(f"state/{rank}")) is not None:
                    found[rank] = RankState.from_json(text)
            absent = [rank for rank in range(self._world_size) if rank not in found]
            if len(self.left(absent)) == len(absent) or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        found.update((state.rank, state) for state in self.left(absent))
        return [found.get(rank, RankState(rank, Status.GONE)) for rank in range(self._world_size)]

    def elect(self, states: list[RankState]) -> bool:
        """True on exactly one rank, the lowest that answered unless it is late; that rank prints the table."""
        answered = [state.rank for state in states if state.status not in (Status.GONE, Status.LEFT)]
        time.sleep(0.25 * answered.index(self._rank) if self._rank in answered else 0.5)
        return bool(self._store.add("reporter", 1) == 1)

    def announce(self, text: str) -> None:
        """The table is printed; let the others see it too."""
        self._store.set("printed", text)

    def wait_printed(self, limit_s: float) -> bool:
        """Wait until some rank has printed the table."""
        deadline = time.monotonic() + limit_s
        while not self._store.check(["printed"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        self._store.add("seen", 1)
        return True

    def wait_seen(self, others: int, limit_s: float) -> None:
        """Wait until `others` ranks know that the table is printed, so that the host of the store may end."""
        deadline = time.monotonic() + limit_s
        while self._store.add("seen", 0) < others and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _read(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        text: str = self._store.get(key).decode()
        return text
