"""Which part of a parameter a rank holds: a cut along one dimension, written down so that it can be undone.

`blocks` are the parts along that dimension which are each cut by themselves: a fused query-key-value matrix has three,
so that each rank gets its heads of all three. A vocabulary that does not divide is padded with rows of zeros: the last
rank holds fewer real ones. Everything is pure; whoever gathers the parts hands them to `assemble`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trilithon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """The cut of one parameter over `degree` ranks, and which part is here.

    shape: of the whole parameter; blocks: sizes along `dim` that add up to shape[dim].
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    degree: int
    index: int
    blocks: tuple[int, ...]

    @staticmethod
    def of(
        name: str, shape: Sequence[int], *, dim: int, degree: int, index: int, blocks: Sequence[int] = (),
        pad: bool = False,
    ) -> ParameterSlice:  # fmt: skip
        """Raises ConfigError when a block does not divide and may not be padded."""
        parts = tuple(blocks) or (shape[dim],)
        if sum(parts) != shape[dim]:
            raise ConfigError(f"parameter '{name}': blocks {parts} do not add up to {shape[dim]} along dim {dim}.")
        ragged = [size for size in parts if size % degree]
        if ragged and not (pad and len(parts) == 1):
            raise ConfigError(
                f"parameter '{name}' of shape {tuple(shape)} does not split over {degree} tensor ranks: "
                f"{ragged[0]} along dim {dim} is not a multiple of {degree}. Choose a width that is, or a smaller "
                "mesh.tensor."
            )
        return ParameterSlice(name, tuple(shape), dim, degree, index, parts)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape here, padding included."""
        size = sum(-(-block // self.degree) for block in self.blocks)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def ranges(self, index: int | None = None) -> list[tuple[int, int]]:
        """[start, stop) along `dim` of the whole parameter, one range per block, without padding."""
        place, at, found = self.index if index is None else index, 0, []
        for block in self.blocks:
            part = -(-block // self.degree)
            found.append((at + min(place * part, block), at + min((place + 1) * part, block)))
            at += block
        return found

    def runs(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Elements [start, start + numel) of the flattened part here, as contiguous ranges of the flattened whole.

        Yields (start here, start in the whole, numel), without padding.
        """
        inner = math.prod(self.shape[self.dim + 1 :])
        row, whole_row = self.local_shape[self.dim] * inner, self.shape[self.dim] * inner
        stop = start + numel
        for outer in range(start // row if row else 0, -(-stop // row) if row else 0):
            at = outer * row
            for low, high in self.ranges():
                length = (high - low) * inner
                first, last = max(start, at), min(stop, at + length)
                if first < last:
                    yield first, outer * whole_row + low * inner + first - at, last - first
                at += length

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole parameter, a new tensor."""
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges()]
        missing = self.local_shape[self.dim] - sum(piece.shape[self.dim] for piece in pieces)
        if missing:
            pieces.append(whole.new_zeros(*whole.shape[: self.dim], missing, *whole.shape[self.dim + 1 :]))
        return (
            torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
        )

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole parameter from every rank's part, in order of rank. The inverse of `cut`."""
        whole = parts[0].new_empty(self.shape)
        for index, part in enumerate(parts):
            at = 0
            for start, stop in self.ranges(index):
                whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, at, stop - start))
                at += stop - start
        return whole
