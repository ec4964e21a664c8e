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
    def agree(self) -> bool:
        return self.first_beyond is None


def differences(
    a: Path, b: Path, base: Path, perturbed: Sequence[Path], steps: int, unit: float
) -> Iterator[Difference]:
    """Compare the records in folders `a` and `b`; `base` and `perturbed` show what rounding does.

    unit: the unit roundoff of the coarser type.
    """
    for step in range(1, steps + 1):
        left, right, origin = (StepRecord.read(folder, step) for folder in (a, b, base))
        moved = [StepRecord.read(folder, step) for folder in perturbed]
        yield _number(step, "loss", left.loss, right.loss, origin.loss, [m.loss for m in moved], unit)
        norms = [grad_norm(record) for record in (left, right, origin)]
        yield _number(step, "grad_norm", *norms, [grad_norm(m) for m in moved], unit)
        if left.changed != right.changed:
            yield Difference(step, "update", "skipped on side " + ("B" if left.changed else "A"), math.inf, math.inf, 0.0)
        for kind, field in (("gradient", "gradients"), ("parameter", "parameters")):
            tensors = [getattr(record, field) for record in (left, right, origin)]
            yield from _tensors(step, kind, *tensors, [getattr(m, field) for m in moved], unit)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """max |a - b|; equal infinities and NaN in the same place are equal, other non-finite values differ by infinity."""
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0:
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a.double() - b.double()).abs())
    return float(torch.where(apart.isnan(), math.inf, apart).max())


def _tensors(
    step: int,
    kind: str,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    perturbed: Sequence[Mapping[str, Tensor]],
    unit: float,
) -> Iterator[Difference]:
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b:
            only = "only on side " + ("B" if name not in a else "A")
            yield Difference(step, kind, f"{name} ({only})", math.inf, math.inf, 0.0)
            continue
        largest = float(a[name].abs().max()) if a[name].numel() else 0.0
        by_rounding = [largest_difference(base[name], m[name]) for m in perturbed if name in base and name in m]
        yield _judged(step, kind, name, largest_difference(a[name], b[name]), largest, by_rounding, unit)


def _number(
    step: int, kind: str, a: float, b: float, base: float, perturbed: Sequence[float], unit: float
) -> Difference:
    def apart(x: float, y: float) -> float:
        return largest_difference(torch.tensor([x], dtype=torch.float64), torch.tensor([y], dtype=torch.float64))

    return _judged(step, kind, "", apart(a, b), abs(a), [apart(base, p) for p in perturbed], unit)


def _judged(
    step: int, kind: str, name: str, max_abs: float, largest: float, by_rounding: Sequence[float], unit: float
) -> Difference:
    scale = largest if math.isfinite(largest) else 0.0
    measured = max((value for value in by_rounding if math.isfinite(value)), default=0.0)
    relative = 0.0 if max_abs == 0 else max_abs / largest if largest > 0 else math.inf
    return Difference(step, kind, name, max_abs, relative, FACTOR * (measured + unit * scale))
