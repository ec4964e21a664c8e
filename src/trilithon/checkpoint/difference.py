"""Where two checkpoints differ: the first element of each tensor, and whether rounding explains it.

    for found in differences("runs/a", "runs/b"):
        print(found)

Tensors are compared by part and name, never by file or rank, so that a run on 2 ranks can be held against one on 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trilithon.checkpoint.manifest import Entry
from trilithon.checkpoint.opening import open_checkpoint
from trilithon.checkpoint.reader import CheckpointReader

_PORTION = 2**20  # elements compared at a time
_ROUNDINGS = 8  # of the largest value of a portion: as many as separate two sums of the same terms


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that is not the same. kind: "only in A", "only in B", "shape", "values".

    first: the first element that differs beyond the tolerance, by its index in the tensor, with both values. elements:
    how many do. largest: the largest absolute difference. allowed: what the tolerance was there.
    """

    part: str
    name: str
    kind: str
    a: str = ""
    b: str = ""
    first: tuple[int, ...] = ()
    elements: int = 0
    largest: float = 0.0
    allowed: float = 0.0

    def __str__(self) -> str:
        where = f"{self.part}/{self.name}"
        if self.kind != "values":
            return f"{where}: {self.kind}" + (f": {self.a} and {self.b}" if self.kind == "shape" else "")
        how_many = "1 element differs" if self.elements == 1 else f"{self.elements} elements differ"
        return (
            f"{where}: first at {list(self.first)}: {self.a} and {self.b}; {how_many}, by "
            f"{self.largest:.3g} at most (allowed {self.allowed:.3g})"
        )


def differences(
    a: Path | str,
    b: Path | str,
    *,
    tag_a: str | None = "latest",
    tag_b: str | None = "latest",
    tolerance: float | None = None,
    parts: Sequence[str] = (),
) -> Iterator[TensorDifference]:
    """Compare two checkpoints tensor by tensor, a few MiB at a time.

    tolerance: 0 for equal bit for bit; None for a few roundings of the coarser type at the size of the largest value
    near by; else relative to that value. parts: which to compare ("param", "master", "exp_avg", ...); all when empty.
    """
    with open_checkpoint(a, tag_a) as left, open_checkpoint(b, tag_b) as right:
        theirs = {(e.part, e.name): e for e in right.entries() if not parts or e.part in parts}
        for entry in left.entries():
            if parts and entry.part not in parts:
                continue
            other = theirs.pop((entry.part, entry.name), None)
            if other is None:
                yield TensorDifference(entry.part, entry.name, "only in A")
            elif other.shape != entry.shape:
                yield TensorDifference(entry.part, entry.name, "shape", str(list(entry.shape)), str(list(other.shape)))
            else:
                found = _compare(left, entry, right, other, tolerance)
                if found is not None:
                    yield found
        for part, name in theirs:
            yield TensorDifference(part, name, "only in B")


def _compare(
    left: CheckpointReader, a: Entry, right: CheckpointReader, b: Entry, tolerance: float | None
) -> TensorDifference | None:
    first: tuple[int, str, str, float] | None = None
    elements, largest = 0, 0.0
    for start in range(0, a.numel, _PORTION):
        count = min(_PORTION, a.numel - start)
        mine, other = left.read(a.part, a.name, start, count), right.read(b.part, b.name, start, count)
        allowed = _allowed(mine, other, tolerance)
        apart = _distance(mine, other)
        beyond = apart > allowed
        number = int(beyond.sum())
        if number and first is None:
            index = int(beyond.nonzero()[0])
            first = (start + index, _shown(mine[index]), _shown(other[index]), allowed)
        elements += number
        largest = max(largest, float(apart.max()))
    if first is None:
        return None
    position, value_a, value_b, allowed = first
    return TensorDifference(
        a.part, a.name, "values", value_a, value_b, _index(position, a.shape), elements, largest, allowed
    )


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| in fp64; 0 where both are the same infinity or both NaN, infinite where only one is finite."""
    if not a.is_floating_point() and not b.is_floating_point() and not a.is_complex():
        return (a != b).double()
    x, y = (value.to(torch.complex128 if value.is_complex() else torch.float64) for value in (a, b))
    same = (x == y) | (x.isnan() & y.isnan())
    apart = torch.where(same, 0.0, (x - y).abs())
    return torch.where(apart.isnan(), math.inf, apart)


def _allowed(a: Tensor, b: Tensor, tolerance: float | None) -> float:
    if tolerance == 0 or not (a.is_floating_point() and b.is_floating_point()):
        return 0.0
    finite = a[a.isfinite()].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    if tolerance is not None:
        return tolerance * size
    return _ROUNDINGS * max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps) * size


def _shown(value: Tensor) -> str:
    return f"{value.item():.9g}" if value.is_floating_point() else str(value.item())


def _index(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        position, inside = divmod(position, size)
        found.append(inside)
    return tuple(reversed(found))
