"""Where what this rank holds lies in the whole model: blocks and slices become ranges of whole parameters.

A checkpoint knows whole parameters only, so it moves freely between meshes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trilithon.engine.engine import Engine


class Place(Protocol):
    """A part of a larger parameter: an expert block or a tile (`zero.layout.Region`), a tensor slice."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def runs(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """(start here, start in the whole, numel) of the contiguous ranges of [start, start + numel)."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, start + numel) of the flattened whole parameter, which lie at `offset` of what is here."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int


def in_whole(  # noqa: PLR0917 (the numbers of a Span)
    engine: Engine, name: str, shape: Sequence[int], start: int, numel: int, offset: int, region: Place | None = None
) -> Iterator[Run]:  # fmt: skip
    """The range of a local parameter `name` as ranges of the whole one. region: of its field, if that has one."""
    place: Place | None = region if region is not None else engine.slices.get(name)
    if place is None:
        yield Run(name, tuple(shape), start, numel, offset)
        return
    for here, there, length in place.runs(start, numel):
        yield Run(place.name, tuple(place.shape), there, length, offset + here - start)


def whole_shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """Every parameter of the whole model by its name there."""
    found = {}
    for entry in engine._sharding.entries:
        place: Place | None = entry.region if entry.region is not None else engine.slices.get(entry.name)
        name, shape = (place.name, place.shape) if place is not None else (entry.name, entry.param.shape)
        found[name] = tuple(shape)
    return found


def mesh_of(engine: Engine) -> dict[str, int]:
    return dict(zip(engine.mesh.axes.names, engine.mesh.axes.sizes))


def same_mesh(engine: Engine, extra: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was written on as many ranks, and each of them had the place that it has here."""
    ranks = len(extra["ranks"])
    saved = extra.get("mesh", {"pipe": 1, "data": ranks, "sequence": 1, "tensor": 1})
    return ranks == engine.world_size and saved == mesh_of(engine)
