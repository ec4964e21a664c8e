"""Tokens on disk, written once and mapped into memory by every rank.

A cache entry is three files and a manifest that share a key:

    KEY.train.bin  KEY.held_out.bin     token ids, uint16 (or uint32 from 65537 tokens on), little endian
    KEY.tokenizer.json                  what turns them back into text
    KEY.json                            the manifest: lengths, entropy, where the tokens came from

The manifest is written last and every file appears under its name complete (temporary name, fsync, rename), so an entry
is either whole or absent: a killed or full-disk build leaves nothing that a later run could take for data.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trilithon.errors import DataError

FORMAT = 1
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BUFFER_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known about one cache entry."""

    key: str
    dtype: str  # "uint16" or "uint32"
    vocab_size: int
    tokenizer: str  # kind
    num_files: int
    num_skipped: int
    split: str  # how held-out text was chosen: "files" or "tails"
    train_tokens: int
    train_bytes: int
    held_out_tokens: int
    held_out_bytes: int
    unigram_entropy: float  # nats per token, of the training tokens

    def train_file(self, folder: Path) -> Path:
        return folder / f"{self.key}.train.bin"

    def held_out_file(self, folder: Path) -> Path:
        return folder / f"{self.key}.held_out.bin"

    def tokenizer_file(self, folder: Path) -> Path:
        return folder / f"{self.key}.tokenizer.json"


def manifest_path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that holds every id of the vocabulary, little endian on any machine."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def read_manifest(path: Path, wait_s: float = 0.0) -> Manifest:
    """Read a manifest and check that its token files are whole.

    wait_s: how long to wait for another process to finish writing it.
    Raises DataError when it does not appear in that time, is damaged, or a token file has another length than it says.
    """
    deadline = time.monotonic() + wait_s
    while not path.exists():
        if time.monotonic() >= deadline:
            raise DataError(
                f"No token cache at {path} after waiting {wait_s:g} s. "
                "The process that builds it failed or is still busy; see its output."
            )
        time.sleep(0.05)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise ValueError("another version of trilithon wrote it")
        manifest = Manifest(**content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"The token cache manifest {path} is damaged ({error}). Delete it and run again.") from error
    expected = {
        manifest.train_file(path.parent): manifest.train_tokens,
        manifest.held_out_file(path.parent): manifest.held_out_tokens,
    }
    for file, tokens in expected.items():
        wanted = tokens * np.dtype(manifest.dtype).itemsize
        actual = file.stat().st_size if file.exists() else -1
        if actual != wanted:
            state = "is missing" if actual < 0 else f"has {actual} bytes"
            raise DataError(f"{file} {state} where its manifest says {wanted} bytes. Delete {path} and run again.")
    return manifest


def map_tokens(file: Path, dtype: str) -> NDArray[Any]:
    """The ids of a token file [n], mapped read-only: pages come from disk as they are touched."""
    return np.memmap(file, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """counts: [V] occurrences of each token -> entropy of their distribution in nats per token.

    It is the loss of the best model that ignores context (Shannon 1948, section 6): a trained model must be below it.
    """
    seen = counts[counts > 0].astype(np.float64)
    if seen.size == 0:
        return 0.0
    share = seen / seen.sum()
    return float(-(share * np.log(share)).sum())


class TokenWriter:
    """Appends ids to an open file and counts them, up to a limit."""

    def __init__(self, stream: BinaryIO, vocab_size: int, limit: int | None = None) -> None:
        self._stream = stream
        self._dtype = token_dtype(vocab_size)
        self._limit = limit
        self.num_tokens = 0
        self.num_bytes = 0  # of text; kept by the caller, who knows the text
        self.counts: NDArray[np.int64] = np.zeros(vocab_size, dtype=np.int64)  # [V]

    @property
    def full(self) -> bool:
        return self._limit is not None and self.num_tokens >= self._limit

    def write(self, ids: NDArray[np.int64]) -> int:
        """ids: [n] int64; what lies beyond the limit is left out. Returns how many were written."""
        if self._limit is not None:
            ids = ids[: max(self._limit - self.num_tokens, 0)]
        for start in range(0, len(ids), _BUFFER_TOKENS):
            piece = ids[start : start + _BUFFER_TOKENS]
            self._stream.write(piece.astype(self._dtype).tobytes())
            self.counts += np.bincount(piece, minlength=len(self.counts))
        self.num_tokens += len(ids)
        return len(ids)


class CacheBuild:
    """The files of one entry while they are written: temporary names until `commit`."""

    def __init__(self, folder: Path, key: str, needed_bytes: int) -> None:
        """needed_bytes: an upper bound of what will be written, for the message when the disk is full."""
        self._folder, self._key, self._needed_bytes = folder, key, needed_bytes
        self._temporary: dict[Path, Path] = {}  # final name -> temporary name

    @contextmanager
    def open(self, final: Path) -> Iterator[BinaryIO]:
        temporary = final.with_name(f"{final.name}.{os.getpid()}.partial")
        self._temporary[final] = temporary
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def commit(self, manifest: Manifest) -> Path:
        """Give every file its name, the manifest last; returns the manifest's path."""
        path = manifest_path(self._folder, self._key)
        with self.open(path) as stream:
            stream.write(json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1).encode())
        for final, temporary in list(self._temporary.items()):
            temporary.replace(final)
            del self._temporary[final]
        return path

    def discard(self) -> None:
        for temporary in self._temporary.values():
            temporary.unlink(missing_ok=True)
        self._temporary.clear()


@contextmanager
def building(folder: Path, key: str, needed_bytes: int) -> Iterator[CacheBuild]:
    """A `CacheBuild` whose temporary files are gone afterwards, whatever happens in between.

    Raises DataError when the folder cannot be written or the disk is full, saying how many bytes are needed.
    """
    build = CacheBuild(folder, key, needed_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield build
    except OSError as error:
        build.discard()
        if error.errno in _FULL:
            free = shutil.disk_usage(folder).free
            raise DataError(
                f"The disk of {folder} is full: the token cache needs up to {needed_bytes:,} bytes and {free:,} are "
                "free. Free some space, give another cache folder, or limit the number of tokens."
            ) from error
        raise DataError(
            f"The token cache cannot be written to {folder} ({error.strerror or error}). Give another cache folder."
        ) from error
    finally:
        build.discard()
