"""How parameters lie in one flat buffer and which contiguous part of it each rank owns. Pure arithmetic, no tensors.

Every parameter starts on a multiple of `ALIGNMENT` elements, parameters of one optimizer group stand together, and the
whole is padded so that it cuts into `world_size` equal, aligned shards. A shard may begin in the middle of a parameter.
Gaps and padding hold zeros, are never counted in norms and never saved.
The flat layout is that of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5); names are kept per range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT = 64  # elements: a cache line or more in every type, so vector kernels and cuBLAS see aligned tensors


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Region:
    """A block of a larger parameter that is laid out by itself: one tile of a tiled layer's weight or bias."""

    name: str  # of the whole parameter
    shape: tuple[int, ...]  # of the whole parameter
    corner: tuple[int, ...]  # index of the block's first element
    block: tuple[int, ...]  # shape of the block

    def runs(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """(start in the block, start in the whole, numel) of the contiguous ranges of [start, start + numel)."""
        width, whole_width = self.block[-1], self.shape[-1]
        if len(self.block) == 1 or width == whole_width:
            yield start, self.corner[0] * math.prod(self.shape[1:]) + start, numel
            return
        stop = start + numel
        while start < stop:
            row, column = divmod(start, width)
            length = min(width - column, stop - start)
            yield start, (self.corner[0] + row) * whole_width + self.corner[1] + column, length
            start += length


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter inside a flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int  # first element in the flat buffer
    group: int  # optimizer parameter group
    region: Region | None = None  # where it lies in a larger parameter, if it is a tile of one

    @property
    def plain_name(self) -> str:
        """What the parameter is called in the plain model."""
        return self.name if self.region is None else self.region.name

    @property
    def plain_shape(self) -> tuple[int, ...]:
        return self.shape if self.region is None else self.region.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in a range of the flat buffer."""

    field: Field
    start: int  # offset in the flattened parameter
    offset: int  # offset in the range
    numel: int


@dataclass(frozen=True)
class FlatLayout:
    """The fields of one flat buffer, in order, and its cut into `world_size` shards."""

    fields: tuple[Field, ...]
    world_size: int

    @staticmethod
    def of(
        parameters: Sequence[tuple[str, tuple[int, ...], int]],
        world_size: int,
        regions: Mapping[str, Region] | None = None,
    ) -> FlatLayout:
        """parameters: (name, shape, group) in the order wanted; they are put in order of group, stably."""
        fields, at = [], 0
        for name, shape, group in sorted(parameters, key=lambda item: item[2]):
            field = Field(name, tuple(shape), at, group, (regions or {}).get(name))
            fields.append(field)
            at = round_up(field.stop, ALIGNMENT)
        return FlatLayout(tuple(fields), world_size)

    @cached_property
    def numel(self) -> int:
        """Elements of the parameters, without gaps and padding."""
        return sum(field.numel for field in self.fields)

    @cached_property
    def padded(self) -> int:
        end = self.fields[-1].stop if self.fields else 0
        return round_up(end, ALIGNMENT * self.world_size)

    @property
    def shard_numel(self) -> int:
        return self.padded // self.world_size

    def owned(self, rank: int) -> tuple[int, int]:
        """[start, stop) of the flat buffer that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The parts of parameters inside [start, stop); empty parameters yield nothing."""
        for field in self.fields:
            low, high = max(start, field.start), min(stop, field.stop)
            if low < high:
                yield Piece(field, low - field.start, low - start, high - low)

    def group_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(group, low, high): [start, stop) cut where the optimizer group changes; gaps belong to the group before."""
        bounds: list[tuple[int, int]] = []  # (group, first element)
        for field in self.fields:
            if not bounds or bounds[-1][0] != field.group:
                bounds.append((field.group, field.start))
        for index, (group, first) in enumerate(bounds):
            last = bounds[index + 1][1] if index + 1 < len(bounds) else self.padded
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield group, low, high

    def gaps(self) -> Iterator[tuple[int, int]]:
        """[start, stop) ranges that hold no parameter."""
        at = 0
        for field in self.fields:
            if field.start > at:
                yield at, field.start
            at = max(at, field.stop)
        if self.padded > at:
            yield at, self.padded
