"""Where two recorded runs differ, and whether rounding alone explains it.

What rounding does is measured: the same run is repeated with every weight moved by one unit in the last place of the
coarser type. A difference between the sides counts as rounding while it stays within `FACTOR` times what that did to
the same tensor at the same step, plus a floor of `FACTOR` roundings of the tensor's largest value. So ill-conditioned
places (Adam on gradients that are nothing but rounding, sums that cancel) are allowed what they really amplify.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trilithon.compare.record import StepRecord, grad_norm

FACTOR = 8.0  # a perturbed run is one sample of rounding; several operations round, and samples scatter


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor at one step. `allowed` is what rounding may do to its largest absolute difference."""

    step: int
    kind: str  # "loss", "grad_norm", "gradient", "parameter", "update"
    name: str
    max_abs: float
    max_rel: float  # max_abs over the largest absolute value of the tensor on side A
    allowed: float

    @property
    def is_rounding(self) -> bool:
        return self.max_abs <= self.allowed

    @property
    def share(self) -> float:
        """`max_abs` in units of `allowed`."""
        if self.max_abs == 0:
            return 0.0
        return self.max_abs / self.allowed if self.allowed > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything compared, in order: per step loss, gradient norm, gradients, parameters."""

    a: str
    b: str
    steps: int
    nproc: int
    dtype: str  # the coarser of the two sides' types
    differences: tuple[Difference, ...]

    @property
    def first(self) -> Difference | None:
        """The first tensor that is not equal bit for bit."""
        return next((d for d in self.differences if d.max_abs > 0), None)

    @property
    def first_beyond(self) -> Difference | None:
        """The first tensor that differs by more than rounding."""
        return next((d for d in self.differences if not d.is_rounding), None)

    @property
    def most_beyond(self) -> Difference | None:
        """The gradient or parameter farthest beyond rounding in the step of `first_beyond`: where to look."""
        first = self.first_beyond
        if first is None:
            return None
        named = [d for d in self.differences if d.step == first.step and d.name and not d.is_rounding]
        for kind in ("gradient", "parameter"):  # a wrong gradient explains a wrong parameter, not the other way
            rows = [d for d in named if d.kind == kind]
            if rows:
                return max(rows, key=lambda d: d.share)
        return None

    @property
    def agree(self) -> bool:
        return self.first_beyond is None


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What rounding does: a run, the same run with perturbed weights, and the unit roundoff of the coarser type."""

    base: Path
    perturbed: Sequence[Path]
    unit: float


def differences(a: Path, b: Path, steps: int, rounding: Yardstick) -> Iterator[Difference]:
    """Compare the records in folders `a` and `b`, step by step: loss, gradient norm, gradients, parameters."""
    for step in range(1, steps + 1):
        left, right, base = (StepRecord.read(folder, step) for folder in (a, b, rounding.base))
        moved = [StepRecord.read(folder, step) for folder in rounding.perturbed]
        if left.changed != right.changed:
            yield Difference(
                step, "update", "skipped on side " + ("B" if left.changed else "A"), math.inf, math.inf, 0.0
            )
        for kind, number in (("loss", lambda record: record.loss), ("grad_norm", grad_norm)):
            scalars = [
                {"": torch.tensor(number(record), dtype=torch.float64)} for record in (left, right, base, *moved)
            ]
            yield from _tensors((step, kind), (scalars[0], scalars[1]), scalars[2], scalars[3:], rounding.unit)
        for kind, field in (("gradient", "gradients"), ("parameter", "parameters")):
            tensors = [getattr(record, field) for record in (left, right, base, *moved)]
            yield from _tensors((step, kind), (tensors[0], tensors[1]), tensors[2], tensors[3:], rounding.unit)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """max |a - b|; equal infinities and NaN in the same place are equal, other non-finite values differ by infinity."""
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0:
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a.double() - b.double()).abs())
    return float(torch.where(apart.isnan(), math.inf, apart).max())


Tensors = Mapping[str, Tensor]


def _tensors(
    where: tuple[int, str], sides: tuple[Tensors, Tensors], base: Tensors, perturbed: Sequence[Tensors], unit: float
) -> Iterator[Difference]:
    a, b = sides
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b:
            only = "only on side " + ("B" if name not in a else "A")
            yield Difference(*where, f"{name} ({only})", math.inf, math.inf, 0.0)
            continue
        max_abs = largest_difference(a[name], b[name])
        largest = float(a[name].abs().max()) if a[name].numel() else 0.0
        by_rounding = [largest_difference(base[name], m[name]) for m in perturbed if name in base and name in m]
        measured = max((value for value in by_rounding if math.isfinite(value)), default=0.0)
        scale = largest if math.isfinite(largest) else 0.0
        relative = 0.0 if max_abs == 0 else max_abs / largest if largest > 0 else math.inf
        yield Difference(*where, name, max_abs, relative, FACTOR * (measured + unit * scale))
