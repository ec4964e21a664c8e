"""The block digest sees what happens to files on disks."""

from __future__ import annotations

import random

import pytest

from trilithon.checkpoint.digest import BLOCK_BYTES, Digester, block_digest


@pytest.mark.parametrize("length", [1, 7, 8, 4096, 8192, 8193, 2**20 + 3])
def test_any_changed_byte_changes_the_digest(length):
    rng = random.Random(length)
    data = bytearray(rng.randbytes(length))
    before = block_digest(data)
    for at in {0, length - 1, *(rng.randrange(length) for _ in range(20))}:
        for flip in (1, 128, rng.randrange(1, 256)):
            data[at] ^= flip
            assert block_digest(data) != before
            data[at] ^= flip
    assert block_digest(data) == before


def test_pages_that_changed_places_and_lost_tails_are_seen():
    data = random.Random(1).randbytes(2**20)
    pages = [data[i : i + 4096] for i in range(0, len(data), 4096)]
    digest = block_digest(data)
    for a, b in ((0, 1), (0, 2), (3, 200)):
        swapped = list(pages)
        swapped[a], swapped[b] = pages[b], pages[a]
        assert block_digest(b"".join(swapped)) != digest
    assert block_digest(data[:-4096] + bytes(4096)) != digest
    assert block_digest(bytes(10)) != block_digest(bytes(11))


def test_a_stream_in_portions_has_the_digests_of_its_blocks():
    data = random.Random(2).randbytes(BLOCK_BYTES + 12345)
    digester = Digester()
    at = 0
    for portion in (10, 0, 700_001, BLOCK_BYTES, 10**9):
        digester.update(memoryview(data[at : at + portion]))
        at += portion
    assert digester.finish() == [block_digest(data[:BLOCK_BYTES]), block_digest(data[BLOCK_BYTES:])]
    assert digester.bytes == len(data)
