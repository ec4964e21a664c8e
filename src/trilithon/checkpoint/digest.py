"""The checksum of a checkpoint's files: one short digest for each block, fast enough to be taken on every read.

A block is a table of 128 rows of 1024 little-endian 64-bit words (the last one of a file is filled up with zeros); the
digest is BLAKE2b over its length and the sums of all columns and all rows modulo 2^64. A change inside one word
always shows, and so does a block whose pages changed places; what the sums miss needs four words that change by
amounts which cancel in rows and columns. It guards against disks, not against people: whoever can write a file can
write the manifest as well. A cryptographic hash over all bytes costs several times what reading them from memory does.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 2**20
"""Bytes covered by one digest: what has to be read to check any part of it."""

_COLUMNS = 1024

Bytes = bytes | bytearray | memoryview


def block_digest(data: Bytes) -> str:
    """The digest of at most `BLOCK_BYTES` bytes, 32 hexadecimal characters."""
    raw: npt.NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8)
    total = hashlib.blake2b(len(raw).to_bytes(8, "little"), digest_size=16)
    row_bytes = 8 * _COLUMNS
    if len(raw) % row_bytes:
        filled = np.zeros(-(-len(raw) // row_bytes) * row_bytes, dtype=np.uint8)
        filled[: len(raw)] = raw
        raw = filled
    table = raw.view("<u8").reshape(-1, _COLUMNS)
    total.update(table.sum(axis=0, dtype=np.uint64).tobytes())
    total.update(table.sum(axis=1, dtype=np.uint64).tobytes())
    return total.hexdigest()


class Digester:
    """Collects the digests of a file that is written from its beginning to its end."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self.bytes = 0
        self._rest = bytearray()

    def update(self, data: memoryview) -> None:
        """Take the next bytes, in portions of any size."""
        self.bytes += len(data)
        if self._rest:
            room = BLOCK_BYTES - len(self._rest)
            self._rest += data[:room]
            data = data[room:]
            if len(self._rest) == BLOCK_BYTES:
                self.blocks.append(block_digest(self._rest))
                self._rest.clear()
        while len(data) >= BLOCK_BYTES:
            self.blocks.append(block_digest(data[:BLOCK_BYTES]))
            data = data[BLOCK_BYTES:]
        if len(data):
            self._rest += data

    def finish(self) -> list[str]:
        """The digests of all blocks, the last one included."""
        if self._rest:
            self.blocks.append(block_digest(self._rest))
            self._rest.clear()
        return self.blocks
