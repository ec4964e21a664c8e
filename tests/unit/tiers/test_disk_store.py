"""State on disk against the same state in a dictionary, under budgets, failures and exceptions."""

from __future__ import annotations

import errno
import gc
import os
import random

import pytest
import torch

from trilithon.errors import TierError
from trilithon.tiers import PAGE, DiskStore, FileIO, ResidentStore, SplitStore, Staging


def store(tmp_path, pages: int = 64, expected: int = 0) -> DiskStore:
    return DiskStore(tmp_path, Staging(pages * PAGE), FileIO(2, 2 * PAGE), expected_bytes=expected)


@pytest.mark.parametrize("pages", [7, 64], ids=["tight", "roomy"])
def test_random_use_equals_a_dictionary(tmp_path, pages):
    """Any size, a zero-length one too; fields that come later; reads, writes, hints in any order."""
    rng, kept, truth = random.Random(pages), store(tmp_path, pages), {}
    generator = torch.Generator().manual_seed(0)
    for key, numel in enumerate((1, 0, 7, 63, 1023, 1024, 1025, 2000)):
        truth[str(key)] = {"master": torch.randn(numel, generator=generator)}
        with kept.borrow(str(key), lambda key=key: {"master": truth[str(key)]["master"].clone()}):
            pass
    for _ in range(150):
        key = rng.choice(list(truth))
        if rng.random() < 0.5:
            kept.prefetch(rng.choice(list(truth)))
        write = rng.random() < 0.6
        with kept.borrow(key, write=write) as state:
            assert state.keys() == truth[key].keys()
            assert all(torch.equal(state[name], truth[key][name]) for name in state)
            if write:
                state["master"].add_(1.5)
                truth[key]["master"] = truth[key]["master"] + 1.5
                if rng.random() < 0.2 and "moment" not in state:
                    state["moment"] = torch.full_like(state["master"], 3.0)
                    truth[key]["moment"] = state["moment"].clone()
                elif rng.random() < 0.2 and "moment" in state:
                    state["moment"] = state["master"] * 2  # replaced instead of written to
                    truth[key]["moment"] = truth[key]["master"] * 2
    kept.finish_writes()
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_types_keep_their_bits(tmp_path):
    kept = store(tmp_path)
    made = {"a": torch.randn(5, dtype=torch.float64), "b": torch.randn(3).bfloat16(), "c": torch.arange(9)}
    with kept.borrow("k", lambda: {name: value.clone() for name, value in made.items()}):
        pass
    with kept.borrow("k") as state:
        assert all(torch.equal(state[name], made[name]) and state[name].dtype == made[name].dtype for name in made)
    kept.close()


def test_an_unknown_key_and_a_promise_not_to_write(tmp_path):
    kept = store(tmp_path)
    with pytest.raises(KeyError), kept.borrow("k"):
        pass
    with kept.borrow("k", lambda: {"a": torch.ones(3)}, write=False) as state:
        assert state["a"].tolist() == [1, 1, 1]
    with pytest.raises(KeyError), kept.borrow("k"):  # not written, so not kept
        pass
    assert kept.bytes()["disk"] == 0
    kept.close()


def test_an_exception_inside_leaves_what_is_on_disk(tmp_path):
    kept = store(tmp_path)
    with kept.borrow("k", lambda: {"a": torch.ones(3)}):
        pass
    with pytest.raises(ZeroDivisionError), kept.borrow("k") as state:
        state["a"].zero_()
        raise ZeroDivisionError
    with kept.borrow("k") as state:
        assert state["a"].tolist() == [1, 1, 1]
    kept.close()


def test_memory_stays_in_the_budget(tmp_path):
    staging = Staging(9 * PAGE)
    kept = DiskStore(tmp_path, staging, FileIO(2))
    for key in range(20):
        with kept.borrow(str(key), lambda: {"a": torch.zeros(1024), "b": torch.zeros(1024), "c": torch.zeros(1024)}):
            pass
    for key in range(20):
        kept.prefetch(str((key + 1) % 20))
        with kept.borrow(str(key)):
            kept.prefetch(str((key + 2) % 20))
    assert staging.peak_bytes <= 9 * PAGE
    assert kept.bytes() == {"disk": 20 * 3 * PAGE, "host": 9 * PAGE}
    kept.close()


def test_too_small_a_budget_names_the_knob(tmp_path):
    kept = store(tmp_path, pages=2)
    with pytest.raises(TierError, match=r"offload\.buffers"):
        with kept.borrow("k", lambda: {"a": torch.zeros(3 * 1024)}):
            pass
    kept.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_reaches_whoever_comes_next(tmp_path, monkeypatch, code):
    kept = store(tmp_path)
    for key in "ab":
        with kept.borrow(key, lambda: {"a": torch.ones(3)}):
            pass
    kept.finish_writes()
    assert kept.failure is None
    real = os.pwritev

    def fail(descriptor, views, offset):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", fail)
    with kept.borrow("a") as state:
        state["a"].zero_()
    with pytest.raises(TierError, match="write of"):
        kept.finish_writes()
    monkeypatch.setattr(os, "pwritev", real)
    for key in "ab":  # also what did not fail: a step needs all of it
        with pytest.raises(TierError, match=f"failed with {errno.errorcode[code]}"), kept.borrow(key):
            pass
    assert kept.failure is not None
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_read_is_told_and_nothing_is_handed_out(tmp_path, monkeypatch):
    kept = store(tmp_path)
    with kept.borrow("k", lambda: {"a": torch.ones(3)}):
        pass
    kept.finish_writes()

    def fail(descriptor, views, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    kept.prefetch("k")
    with pytest.raises(TierError, match="read of"), kept.borrow("k"):
        raise AssertionError("nothing was to be handed out")
    kept.close()


def test_more_than_was_reserved_is_reserved_or_refused(tmp_path, monkeypatch):
    kept = store(tmp_path, expected=2 * PAGE)

    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for key in "abc":
        with kept.borrow(key, lambda: {"a": torch.ones(3)}):
            pass
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierError, match="do not fit on the disk"):
        with kept.borrow("d", lambda: {"a": torch.ones(3)}):
            pass
    kept.close()


def test_fifty_stores_leave_nothing_open(tmp_path):
    def use() -> None:
        kept = store(tmp_path)
        with kept.borrow("k", lambda: {"a": torch.ones(1000)}):
            pass
        kept.close()

    use()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(50):
        use()
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
    assert list(tmp_path.iterdir()) == []


def test_a_split_store_sends_each_key_to_its_tier(tmp_path):
    near = ResidentStore("device")
    both = SplitStore(near, store(tmp_path), {"a"}.__contains__)
    for key in "ab":
        with both.borrow(key, lambda: {"m": torch.ones(1024)}):
            both.prefetch("b")
    assert both.bytes() == {"disk": PAGE, "host": 64 * PAGE, "device": PAGE}
    assert both.failure is None
    both.close()
    assert near.bytes() == {"device": 0}
