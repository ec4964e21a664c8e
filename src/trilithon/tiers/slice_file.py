"""Tensors in one file, each in memory only while somebody holds what was read: for what is made once and taken once."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from trilithon.errors import TierError
from trilithon.tiers.disk import RunFolder, unusable
from trilithon.tiers.resident import resident


class SliceFile(MutableMapping[int, Tensor]):
    """Flat CPU tensors by number, in a folder of its own under `path`, gone with this object or the process.

    Reading gives a copy; writing a key again with as many bytes uses its place. Through the page cache, which the
    system takes back when memory is short. Raises ConfigError if `path` cannot be used, TierError if a request fails.
    """

    def __init__(self, path: Path) -> None:
        self._run = RunFolder(path)
        self._path = self._run.folder / "slices"
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._run.close()
            raise unusable(path, error) from error
        self._places: dict[int, tuple[int, int, torch.dtype]] = {}  # offset and elements
        self._end = 0

    def __setitem__(self, key: int, values: Tensor) -> None:
        data = _bytes(values.detach().contiguous())
        offset, numel, dtype = self._places.get(key, (self._end, -1, values.dtype))
        if (numel, dtype) != (values.numel(), values.dtype):
            offset, self._end = self._end, self._end + len(data)
        at = 0
        try:
            while at < len(data):
                at += os.pwrite(self._descriptor, data[at : at + (1 << 30)], offset + at)
        except OSError as error:
            raise TierError(
                f"{len(data)} bytes of a parameter could not be written to {self._path}: {error.strerror}. Free space "
                "there, or name another folder."
            ) from error
        self._places[key] = (offset, values.numel(), values.dtype)

    def __getitem__(self, key: int) -> Tensor:
        offset, numel, dtype = self._places[key]
        values = resident(numel, dtype)
        data, at = _bytes(values), 0
        while at < len(data):
            try:
                count = os.preadv(self._descriptor, [data[at : at + (1 << 30)]], offset + at)
            except OSError as error:
                raise TierError(f"a parameter could not be read from {self._path}: {error.strerror}.") from error
            if count == 0:
                raise TierError(f"{self._path} is shorter than what was written to it: somebody else changed it.")
            at += count
        return values

    def __delitem__(self, key: int) -> None:
        del self._places[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def close(self) -> None:
        """Remove the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._places.clear()
        self._run.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)  # the folder goes with its owner, which has a finalizer of its own


def _bytes(values: Tensor) -> memoryview:
    return memoryview(cast(Any, values.view(torch.uint8).numpy()))
