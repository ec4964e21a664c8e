"""A part of the store that only this start of the ranks uses.

torch's elastic agent keeps its store while it starts ranks again, so what the ranks of an earlier start left there (the
addresses that gloo connects to, a watchdog's notes) would be taken for that of the new ones by whoever reads first. The
agents of several machines do not even count their starts alike. So the ranks agree on a name that nobody has used:

    rank r says a word of its own -> rank 0 publishes the name with all the words it has heard -> rank r, seeing its own
    word among them, takes the name and says so -> rank 0 goes on when all have
"""

from __future__ import annotations

import json
import os
import time
import uuid
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from trilithon.errors import CollectiveError

_SHARED = "TORCHELASTIC_USE_AGENT_STORE"  # set for each rank by torch's elastic agent
_WORD, _NAME = "trilithon/word", "trilithon/attempt"
_POLL_S = 0.005


def outlives_ranks() -> bool:
    """Whether the store belongs to an agent that may start ranks more than once."""
    return os.environ.get(_SHARED) == "True"


def fresh_part(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """A view of `store` under a name that all ranks of this start share, and no other start. Collective.

    Raises CollectiveError naming the ranks that did not come within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    name = _publish(store, world_size, deadline) if rank == 0 else _adopt(store, rank, deadline)
    return PrefixStore(name, store)


def _publish(store: Store, world_size: int, deadline: float) -> str:
    name, told = uuid.uuid4().hex, None
    while True:
        words = [_read(store, f"{_WORD}/{rank}") for rank in range(1, world_size)]
        if words != told:
            told = words
            store.set(_NAME, json.dumps({"name": name, "words": words}))
        if store.add(f"{name}/taken", 0) == world_size - 1:
            return name
        if time.monotonic() > deadline:
            silent = [rank for rank in range(1, world_size) if not store.check([f"{name}/taken/{rank}"])]
            raise CollectiveError(f"ranks {silent} did not come to the start of {world_size} ranks. Were they started?")
        time.sleep(_POLL_S)


def _adopt(store: Store, rank: int, deadline: float) -> str:
    word = uuid.uuid4().hex
    store.set(f"{_WORD}/{rank}", word)
    while True:
        said = _read(store, _NAME)
        offer: dict[str, Any] = json.loads(said) if said else {"words": []}
        if word in offer["words"]:
            name = str(offer["name"])
            store.set(f"{name}/taken/{rank}", "")
            store.add(f"{name}/taken", 1)
            return name
        if time.monotonic() > deadline:
            raise CollectiveError(f"rank {rank} waited in vain for rank 0 at the start. Was it started?")
        time.sleep(_POLL_S)


def _read(store: Store, key: str) -> str:
    """The value of a key, "" while there is none; `get` alone would wait for it."""
    return store.get(key).decode() if store.check([key]) else ""
