"""Tensors under the names of the plain model: the tiles of one weight become that weight again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from trilithon.zero.grouping import Entry


class Joining:
    """entries: of the model. `names` are those of the plain model, in order, each once."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        tiles = [entry for entry in entries if entry.place is None]  # blocks on other ranks are joined elsewhere
        self._regions = {entry.name: entry.region for entry in tiles if entry.region is not None}
        self.names = list(dict.fromkeys(entry.plain_name for entry in entries))

    def plain(self, names: Iterable[str]) -> list[str]:
        """The names in the plain model, each once."""
        return list(dict.fromkeys(self._regions[n].name if n in self._regions else n for n in names))

    def parts(self, names: Iterable[str]) -> set[str]:
        """What has to be asked for so that these can be put together."""
        wanted = set(names)
        return wanted | {part for part, region in self._regions.items() if region.name in wanted}

    def join(self, items: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) pairs with every tile put into its whole, which comes when its last tile has come."""
        open_: dict[str, tuple[Tensor, int]] = {}
        for name, tensor in items:
            region = self._regions.get(name)
            if region is None:
                yield name, tensor
                continue
            whole, missing = open_.pop(region.name, (None, math.prod(region.shape)))
            if whole is None:
                whole = tensor.new_empty(region.shape)
            spans = tuple(slice(at, at + size) for at, size in zip(region.corner, region.block, strict=True))
            whole[spans].copy_(tensor)
            missing -= tensor.numel()
            if missing:
                open_[region.name] = (whole, missing)
            else:
                yield region.name, whole
