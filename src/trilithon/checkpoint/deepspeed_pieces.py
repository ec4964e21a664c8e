"""Where the elements of each parameter lie in the files of DeepSpeed's ranks: arithmetic over flat tensors.

Stages 1 and 2: the parameters of a group stand one after the other in one flat tensor, which is padded at its end and
cut into one part for each rank. Stage 3: each parameter is cut for itself into ceil(n / ranks) elements for each rank,
the last part padded; a rank's parts stand one after the other, in sub-groups that begin with a parameter.
(ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054, section 5; the file layout is that of DeepSpeed 0.19.8.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trilithon.errors import CheckpointError

Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, start + numel) of a flattened tensor are elements [offset, offset + numel) of `source()`."""

    start: int
    numel: int
    source: Callable[[], Tensor]  # flat
    offset: int


@dataclass
class Assembly:
    """One whole tensor, and the pieces it is put together from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def copy(self, start: int, into: Tensor) -> None:
        """Elements [start, start + into.numel()) to `into`."""
        stop = start + into.numel()
        for piece in self.pieces:
            low, high = max(start, piece.start), min(stop, piece.start + piece.numel)
            if low < high:
                at = piece.offset + low - piece.start
                into[low - start : high - start].copy_(piece.source()[at : at + high - low])


def whole(tensor: Tensor, shape: Sequence[int] | None = None) -> Assembly:
    """A tensor that lies in one piece; shape: its own, or that of the flat beginning of it."""
    shape = tuple(tensor.shape if shape is None else shape)
    return Assembly(shape, tensor.dtype, [Piece(0, math.prod(shape), lambda: tensor.detach().reshape(-1), 0)])


def _at(tensor: Tensor) -> Callable[[], Tensor]:
    flat = tensor.detach().reshape(-1)
    return lambda: flat


@dataclass(frozen=True, slots=True)
class Place:
    """The next `numel` elements of parameter `name` lie at `offset` of one rank's flat tensor."""

    name: str
    offset: int
    numel: int


def flat_places(shapes: Shapes, lengths: Sequence[int], gaps: Sequence[int] = ()) -> list[list[Place]]:
    """For each rank, the places of one group of stage 1 or 2.

    lengths: of each rank's part, of which the last ones may lack padding. gaps: padding after each parameter. The files
    also hold `param_slice_mappings`, which are not used: with round_robin_gradients release 0.19.8 writes them in
    another order than the flat tensors, while the order of `param_shapes` was right in every file looked at.
    """
    found: list[list[Place]] = [[] for _ in lengths]
    rank, begin, at = 0, 0, 0
    for index, (name, shape) in enumerate(shapes.items()):
        left = math.prod(shape)
        while left and rank < len(lengths):
            room = begin + lengths[rank] - at
            if room <= 0:
                begin, rank = begin + lengths[rank], rank + 1
                continue
            found[rank].append(Place(name, at - begin, min(left, room)))
            at, left = at + min(left, room), left - min(left, room)
        at += gaps[index] if index < len(gaps) else 0
    return found


def sharded_places(groups: Sequence[Shapes], lengths: Sequence[int], rank: int, ranks: int) -> list[list[Place]]:
    """For each sub-group of one rank of stage 3, its places. lengths: of the rank's flat tensor of each sub-group."""
    found: list[list[Place]] = [[] for _ in lengths]
    sub, at = 0, 0
    for name, shape in (item for group in groups for item in group.items()):
        numel = math.prod(shape)
        share = -(-numel // ranks)
        while sub < len(lengths) and at == lengths[sub] and share:
            sub, at = sub + 1, 0
        if share and (sub == len(lengths) or at + share > lengths[sub]):
            raise CheckpointError(
                f"rank {rank} of {ranks} should hold {share} elements of '{name}' {list(shape)}, for which its flat "
                f"tensors of {list(lengths)} elements have no room. The files do not belong together."
            )
        if share:
            found[sub].append(Place(name, at, max(0, min(share, numel - rank * share))))
        at += share
    return found


def assemble(shapes: Shapes, parts: Sequence[tuple[Sequence[Place], Tensor]], what: str) -> dict[str, Assembly]:
    """Put whole tensors together. parts: places and the flat tensor they are in, in order of rank.

    Raises CheckpointError, naming the parameter, unless every element is there exactly once.
    """
    found: dict[str, Assembly] = {}
    dtype = parts[0][1].dtype if parts else torch.float32
    for name, shape in shapes.items():
        found[name] = Assembly(tuple(shape), dtype)
    reached = dict.fromkeys(shapes, 0)
    for places, tensor in parts:
        source = _at(tensor)
        for place in places:
            if place.offset + place.numel > tensor.numel() or place.name not in found:
                raise CheckpointError(f"{what} of '{place.name}' points outside of the file it is said to be in.")
            found[place.name].pieces.append(Piece(reached[place.name], place.numel, source, place.offset))
            reached[place.name] += place.numel
    for name, assembly in found.items():
        if reached[name] != assembly.numel:
            raise CheckpointError(
                f"{what} of '{name}' {list(assembly.shape)} has {reached[name]} elements in the files of "
                f"{len(parts)} parts, and {assembly.numel} are needed. Copy the files of all ranks, of one save."
            )
    return found
