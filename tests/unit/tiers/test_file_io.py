"""Background file IO against a plain copy of the bytes, with a system that stops short, fails, or knows no O_DIRECT."""

from __future__ import annotations

import errno
import os
import random

import pytest
import torch

from trilithon.errors import ProtocolError, TierError
from trilithon.tiers import PAGE, File, FileIO, Staging

PAGES = 64


@pytest.fixture
def io():
    made = FileIO(threads=3, piece_bytes=4 * PAGE)
    yield made
    made.close()


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def file(tmp_path, request):
    made = File(tmp_path / "state", direct=request.param)
    made.reserve(PAGES * PAGE)
    yield made
    made.close()


def memory(pages: int = PAGES, seed: int = 0) -> torch.Tensor:
    lease = Staging(pages * PAGE).acquire(pages * PAGE)
    lease.memory.random_(generator=torch.Generator().manual_seed(seed))
    return lease.memory


def test_random_requests_equal_a_plain_copy(io, file):
    rng, truth, source, found = random.Random(3), torch.zeros(PAGES * PAGE, dtype=torch.uint8), memory(), memory()
    for _ in range(20):
        start = rng.randrange(PAGES)
        stop = rng.randrange(start + 1, PAGES + 1)
        part = slice(start * PAGE, stop * PAGE)
        io.write(file, source[: part.stop - part.start], part.start).wait()
        truth[part] = source[: part.stop - part.start]
        source.add_(1)
    tickets = [io.read(file, found[at : at + 8 * PAGE], at) for at in range(0, PAGES * PAGE, 8 * PAGE)]
    for ticket in tickets:
        ticket.wait()
        ticket.wait()
    assert torch.equal(found, truth)
    assert io.bytes_read == PAGES * PAGE


@pytest.mark.parametrize("moved", [lambda n: max(n // 2, 1), lambda n: n - 1, lambda n: min(n, PAGE)])
def test_what_the_system_leaves_undone_is_continued(io, file, monkeypatch, moved):
    read, write = os.preadv, os.pwritev
    short = {"left": 5}

    def cut(call):
        def run(descriptor, views, offset):
            if short["left"] > 0 and len(views[0]) > PAGE:
                short["left"] -= 1
                count = moved(len(views[0]))
                whole = -(-count // PAGE) * PAGE  # O_DIRECT moves blocks; the rest of the last one is then done again
                return min(call(descriptor, [views[0][:whole]], offset), count)
            return call(descriptor, views, offset)

        return run

    monkeypatch.setattr(os, "pwritev", cut(write))
    monkeypatch.setattr(os, "preadv", cut(read))
    source, found = memory(seed=1), memory(seed=2)
    io.write(file, source, 0).wait()
    short["left"] = 5
    io.read(file, found, 0).wait()
    assert short["left"] == 0
    assert torch.equal(source, found)


def test_an_interrupted_call_is_made_again(io, file, monkeypatch):
    write, calls = os.pwritev, []

    def interrupted(descriptor, views, offset):
        calls.append(offset)
        if len(calls) % 2:
            raise InterruptedError(errno.EINTR, "signal")
        return write(descriptor, views, offset)

    monkeypatch.setattr(os, "pwritev", interrupted)
    source, found = memory(seed=1), memory(seed=2)
    io.write(file, source, 0).wait()
    io.read(file, found, 0).wait()
    assert torch.equal(source, found)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failure_is_told_by_wait_with_path_offset_and_operation(io, file, monkeypatch, code):
    def fail(descriptor, views, offset):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", fail)
    ticket = io.write(file, memory(8), 4 * PAGE)
    with pytest.raises(TierError, match=rf"write of {8 * PAGE} bytes at offset {4 * PAGE} of .*state failed with E"):
        ticket.wait()
    with pytest.raises(TierError, match=r"offload\.path"):
        ticket.wait()
    assert ticket.failed() and ticket.done()


def test_reading_past_the_end_is_a_failure_and_not_garbage(io, file):
    with pytest.raises(TierError, match="read of"):
        io.read(file, memory(8), PAGES * PAGE).wait()


def test_a_system_that_takes_nothing_ends_in_an_error(io, file, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda descriptor, views, offset: 0)
    with pytest.raises(TierError, match="write of"):
        io.write(file, memory(2), 0).wait()


def test_misaligned_requests_are_refused(io, file):
    source = memory()
    for part, offset in ((source[1 : PAGE + 1], 0), (source[: PAGE - 1], 0), (source[:PAGE], 7), (source[:0], 0)):
        with pytest.raises(ProtocolError, match=f"multiples of {PAGE}"):
            io.write(file, part, offset)


def test_a_filesystem_without_o_direct_goes_through_the_cache(tmp_path, io, monkeypatch):
    real = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    file = File(tmp_path / "state")
    assert not file.direct
    source, found = memory(8, seed=1), memory(8, seed=2)
    io.write(file, source, 0).wait()
    io.read(file, found, 0).wait()
    assert torch.equal(source, found)
    file.close()


def test_callbacks_run_before_wait_returns(io, file):
    seen = []
    ticket = io.write(file, memory(8), 0)
    ticket.then(lambda done: seen.append(done.failed()))
    ticket.wait()
    assert seen == [False]
    ticket.then(lambda done: seen.append(True))
    assert seen == [False, True]
