"""The part of the store that one start of the ranks shares, when the store has outlived an earlier start."""

import threading
import time

import pytest
import torch.distributed as dist

from trilithon.comm.attempt import fresh_part
from trilithon.errors import CollectiveError


def start(store: dist.Store, world_size: int, late: int | None = None) -> list[dist.Store]:
    """All ranks of one start, each in a thread; rank `late` comes after the others."""
    found: dict[int, dist.Store] = {}

    def join(rank: int) -> None:
        if rank == late:
            time.sleep(0.2)
        found[rank] = fresh_part(store, rank, world_size, timeout_s=20)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(world_size)]


@pytest.mark.parametrize("late", [None, 0, 1, 2])
def test_each_start_has_a_part_of_its_own_that_all_its_ranks_share(late):
    store = dist.HashStore()
    for attempt, world_size in enumerate([3, 3, 4, 3]):
        parts = start(store, world_size, late)
        assert not any(part.check(["address"]) for part in parts), "what an earlier start left is not seen"
        parts[-1].set("address", str(attempt))
        assert {part.get("address") for part in parts} == {str(attempt).encode()}


def test_one_rank_alone_waits_for_nobody():
    assert not fresh_part(dist.HashStore(), 0, 1, timeout_s=5).check(["x"])


def test_who_does_not_come_is_named():
    with pytest.raises(CollectiveError, match=r"ranks \[1, 2\] did not come to the start of 3 ranks"):
        fresh_part(dist.HashStore(), 0, 3, timeout_s=0.1)
    with pytest.raises(CollectiveError, match="rank 2 waited in vain for rank 0"):
        fresh_part(dist.HashStore(), 2, 3, timeout_s=0.1)
