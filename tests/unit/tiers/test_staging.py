"""The budget of staging memory: aligned, reused, never more than asked for, and no waiting for ever."""

from __future__ import annotations

import random
import threading
from itertools import pairwise

import pytest

from trilithon.errors import TierError
from trilithon.tiers import PAGE, Staging


def test_pieces_are_aligned_and_never_overlap():
    rng, staging, held = random.Random(1), Staging(64 * PAGE), []
    for _ in range(300):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held))).release()
        lease = staging.try_acquire(rng.randrange(1, 12 * PAGE))
        if lease is not None:
            held.append(lease)
            assert lease.memory.data_ptr() % PAGE == 0 and lease.size % PAGE == 0
        taken = sorted((one.start, one.start + one.size) for one in held)
        assert all(a[1] <= b[0] for a, b in pairwise(taken))
        assert not taken or taken[-1][1] <= 64 * PAGE
    for lease in held:
        lease.release()
    assert staging.acquire(64 * PAGE).size == 64 * PAGE  # nothing is lost, nothing stays in pieces


def test_no_memory_is_taken_before_the_first_use():
    staging = Staging(8 * PAGE)
    assert staging.mapped_bytes == 0
    lease = staging.acquire(1)
    assert staging.mapped_bytes == 8 * PAGE
    lease.release()
    staging.close()
    assert staging.mapped_bytes == 0


def test_a_piece_beyond_the_budget_names_the_knob_and_both_numbers():
    with pytest.raises(TierError, match=rf"{3 * PAGE} bytes does not fit: the budget is {2 * PAGE}.*offload.buffers"):
        Staging(2 * PAGE).acquire(2 * PAGE + 1)


def test_waiting_while_holding_everything_is_an_error():
    staging = Staging(2 * PAGE, knob="offload.buffers")
    held = staging.acquire(2 * PAGE)
    with pytest.raises(TierError, match=r"none is about to come back. Raise offload.buffers"):
        staging.acquire(PAGE)
    held.release()
    staging.acquire(PAGE)


def test_a_piece_in_flight_is_waited_for():
    staging = Staging(2 * PAGE)
    held = staging.acquire(2 * PAGE)
    held.fly()
    timer = threading.Timer(0.05, held.release)
    timer.start()
    assert staging.acquire(PAGE).size == PAGE
    timer.join()


def test_releasing_twice_is_our_own_mistake():
    lease = Staging(PAGE).acquire(1)
    lease.release()
    with pytest.raises(AssertionError):
        lease.release()
