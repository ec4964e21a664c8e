"""The mesh: which rank works on which part of the model and of the batch. Pure arithmetic, no torch.

Ranks are numbered row by row over the axes pipe, data, sequence, tensor, the last one varying fastest: tensor slices
talk most and stay neighbours (usually on one host), pipeline stages talk least. With sizes S, N, Q, T the rank at
(p, d, q, t) is ((p N + d) Q + q) T + t. (The order of axes: Narayanan et al. 2021, arXiv:2104.04473, section 3.4.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trilithon.config.base import Flag, Positive, Section, show
from trilithon.errors import ConfigError

AXES = ("pipe", "data", "sequence", "tensor")
REPLICAS = ("data", "sequence")  # these ranks hold the same slice of the model: ZeRO cuts state over both
EXPERT_RANKS = ("data", "sequence", "tensor")  # these ranks can share out the experts of a layer
_SHOWN_RANKS, _SHOWN_GROUPS = 64, 8


@dataclass(frozen=True, slots=True)
class Axes:
    """Named axes and their sizes, e.g. `Axes(("data", "tensor"), (4, 2))` for eight ranks."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names) or not self.names:
            raise ConfigError(f"mesh axes need one size for each distinct name; got {self.names} with {self.sizes}.")
        if any(size < 1 for size in self.sizes):
            raise ConfigError(f"mesh axis sizes must be at least 1; got {dict(zip(self.names, self.sizes))}.")

    @property
    def world_size(self) -> int:
        """How many ranks the axes span."""
        return math.prod(self.sizes)

    def size(self, axes: str | Sequence[str]) -> int:
        """How many ranks a group over these axes has."""
        return math.prod(self.sizes[self._index(axis)] for axis in _listed(axes))

    def index(self, axes: str | Sequence[str], rank: int) -> int:
        """The place of `rank` in its group over these axes, the last axis given varying fastest."""
        here, place = self.coordinates(rank), 0
        for axis in _listed(axes):
            place = place * self.sizes[self._index(axis)] + here[axis]
        return place

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` is on each axis. Raises ConfigError for a rank outside the mesh."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside a mesh of {self.world_size} ranks {self._drawn()}.")
        found: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes)):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.names}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates; the inverse of `coordinates`. Every axis must be given."""
        if set(coordinates) != set(self.names):
            raise ConfigError(f"coordinates {dict(coordinates)} do not name exactly the axes {self.names}.")
        rank = 0
        for name, size in zip(self.names, self.sizes):
            if not 0 <= coordinates[name] < size:
                raise ConfigError(f"coordinate {name}={coordinates[name]} is outside axis {name} of size {size}.")
            rank = rank * size + coordinates[name]
        return rank

    def ranks_at(self, coordinates: Mapping[str, int]) -> list[int]:
        """All ranks with these coordinates, in order; axes that are not named may be anywhere."""
        for axis in coordinates:
            self._index(axis)
        places = ((rank, self.coordinates(rank)) for rank in range(self.world_size))
        return [rank for rank, here in places if coordinates.items() <= here.items()]

    def groups(self, axes: str | Sequence[str]) -> list[tuple[int, ...]]:
        """The groups of ranks that differ on these axes only, each in order of its coordinates, by first rank."""
        wanted = _listed(axes)
        for axis in wanted:
            self._index(axis)
        firsts = [r for r in range(self.world_size) if not any(self.coordinates(r)[axis] for axis in wanted)]
        return [self.group_of(axes, first) for first in firsts]

    def group_of(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """The group of `groups(axes)` that contains `rank`."""
        here, wanted = self.coordinates(rank), _listed(axes)
        places = itertools.product(*(range(self.sizes[self._index(axis)]) for axis in wanted))
        return tuple(self.rank({**here, **dict(zip(wanted, place))}) for place in places)

    def _index(self, axis: str) -> int:
        if axis not in self.names:
            raise ConfigError(f"the mesh has no axis {axis!r}; its axes are {self._drawn()}.")
        return self.names.index(axis)

    def _drawn(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes))


class MeshConfig(Section):
    """How many parts the model and the batch are cut into, along each axis. The product is the number of ranks."""

    pipe: Positive = 1
    """Stages of a pipeline: consecutive layers on different ranks."""
    data: Positive | None = None
    """Ranks that see different samples. null: what the other axes leave over."""
    sequence: Positive = 1
    """Ranks that hold different tokens of the same samples (Jacobs et al. 2023, arXiv:2309.14509)."""
    tensor: Positive = 1
    """Ranks that hold different slices of each matrix (Shoeybi et al. 2019, arXiv:1909.08053)."""

    def axes(self, world_size: int) -> Axes:
        """The mesh over `world_size` ranks. Raises ConfigError when the product of the axes cannot be that."""
        others = self.pipe * self.sequence * self.tensor
        drawn = " x ".join(f"mesh.{name}={value}" for name in AXES if (value := getattr(self, name)) not in (1, None))
        if self.data is None:
            if world_size < 1 or world_size % others:
                below = world_size // others * others
                nearest = f"{below} or {below + others}" if below else f"{others}"
                raise ConfigError(
                    f"{drawn or 'the mesh'} does not divide {show(world_size)} ranks, so nothing is left for "
                    f"mesh.data. Start {nearest} ranks, or change an axis."
                )
            return Axes(AXES, (self.pipe, world_size // others, self.sequence, self.tensor))
        if self.data * others != world_size:
            raise ConfigError(
                f"the mesh {drawn or 'mesh.data=1'} has {self.data * others} ranks, but {world_size} are running. "
                f"Start {self.data * others} ranks, or leave mesh.data out and let it be what is left over."
            )
        return Axes(AXES, (self.pipe, self.data, self.sequence, self.tensor))


class TensorConfig(Section):
    """How matrices are cut over the tensor axis. Without effect while mesh.tensor is 1."""

    plan: dict[str, str] | None = None
    """Patterns of module names to styles: column, row, vocabulary, norm. null: the model's own plan, or one found."""
    cut_norms: Flag = False
    """Cut tokens over the tensor ranks between the matrices, where norms, dropout and residuals are computed
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2)."""


def draw(axes: Axes) -> str:
    """The mesh as text: where each rank is, and who talks to whom along each axis."""
    sizes = dict(zip(axes.names, axes.sizes))
    lines = [f"{axes.world_size} ranks = " + " x ".join(f"{size} {name}" for name, size in sizes.items()), ""]
    rows = [("rank", *axes.names)]
    shown = range(min(axes.world_size, _SHOWN_RANKS))
    rows += [(str(rank), *(str(place) for place in axes.coordinates(rank).values())) for rank in shown]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    if axes.world_size > _SHOWN_RANKS:
        lines.append(f"... and {axes.world_size - _SHOWN_RANKS} more")
    lines.append("")
    wanted: list[tuple[str, Sequence[str]]] = [(f"groups of {name}", (name,)) for name in axes.names]
    replicas = [name for name in REPLICAS if name in axes.names]
    wanted += [(f"ZeRO cuts over {' x '.join(replicas)}", replicas)] if replicas else []
    wanted += [("one norm, one skip decision over", axes.names)]
    width = max(len(title) for title, _ in wanted)
    lines += [f"{title.ljust(width)}  {_drawn_groups(axes.groups(over))}" for title, over in wanted]
    return "\n".join(lines)


def _drawn_groups(groups: Sequence[tuple[int, ...]]) -> str:
    if all(len(group) == 1 for group in groups):
        return "each rank by itself"
    drawn = [f"[{', '.join(map(str, _abridged(group)))}]" for group in groups[:_SHOWN_GROUPS]]
    return " ".join(drawn) + (f" ... {len(groups)} groups" if len(groups) > _SHOWN_GROUPS else "")


def _abridged(group: tuple[int, ...]) -> list[object]:
    return list(group) if len(group) <= _SHOWN_RANKS else [*group[:4], "...", group[-1]]


def _listed(axes: str | Sequence[str]) -> Sequence[str]:
    return (axes,) if isinstance(axes, str) else axes
