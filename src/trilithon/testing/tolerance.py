"""How far two correct runs may drift apart, derived from rounding, and the comparison that uses it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trilithon.testing.parity import PlainRun, PrecisionName

_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}  # half the spacing at 1


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Relative limits. Distances compare how far apart two runs end with how far the reference went from its start."""

    loss: float
    grad_norm: float
    distance: float  # all parameters as one vector
    parameter_distance: float  # each parameter by itself


def tolerance(precision: PrecisionName, steps: int, *, optimizer: str = "adamw", terms: int = 256) -> Tolerance:
    """The limits for `steps` steps, where a gradient element is a sum of about `terms` products.

    *Noise.* In fp32 the same sum in another order differs by about sqrt(terms) roundings u of its size: noise
    n = sqrt(terms) * u. In bf16 and fp16 both runs do the same arithmetic on the same low values, part by part; what
    may differ is one rounding of the averaged gradient (a library may keep it in the low type), and then, where two
    masters round to different neighbours, one rounding of a weight: n = u, whatever `terms` is.

    *Losses and norms* change by n for the rounding of their own sums, and by n for each step's share of the way, which
    adds up like a random walk: 2 n (1 + sqrt(steps)), the 2 for the two runs that each have such an error.

    *Distance.* Where the update is linear in the gradient (sgd), a step is off by n of its length. The errors of steps
    add at worst like sqrt(steps) compared with the way, since the way may turn: 2 n sqrt(steps). Where the update is
    close to the sign of the gradient (adam, adamw, lamb, lion, adagrad in its first steps), a gradient smaller than the
    noise may change sides. With the density of gradients around zero near 1 / their size, that is a part n of the
    elements, each off by 2 steps, so sqrt(4 n) of the length: 2 sqrt(n) sqrt(steps).

    *One parameter* has few elements, so its distance varies around that of the whole: 4 times as much is let through,
    and never more than 0.7, so that a parameter that did not train (distance 1) fails in any precision.
    """
    roundoff = _ROUNDOFF[precision]
    noise = math.sqrt(terms) * roundoff if precision == "fp32" else roundoff
    of_one_step = 2 * noise if optimizer == "sgd" else 2 * math.sqrt(noise)
    distance = min(0.7, of_one_step * math.sqrt(steps))
    sums = 2 * noise * (1 + math.sqrt(steps))
    return Tolerance(sums, sums, distance, min(0.7, 4 * distance))


def assert_same_training(
    reference: PlainRun,
    losses: Sequence[float],
    parameters: Mapping[str, Tensor],
    limits: Tolerance,
    grad_norms: Sequence[float] | None = None,
) -> None:
    """Raise AssertionError with every difference beyond the limits: losses, norms, names, and parameters.

    parameters: fp32 by name, as `PlainRun.parameters`. What the reference did not change has to be equal bit for bit.
    """
    found = _series("loss", reference.losses, losses, limits.loss)
    if grad_norms is not None:
        found += _series("gradient norm", reference.grad_norms, grad_norms, limits.grad_norm)
    if set(parameters) != set(reference.parameters):
        missing, extra = set(reference.parameters) - set(parameters), set(parameters) - set(reference.parameters)
        raise AssertionError(f"parameter names differ: missing {sorted(missing)}, unexpected {sorted(extra)}")
    apart_total = way_total = 0.0
    for name, expected in reference.parameters.items():
        if parameters[name].shape != expected.shape:
            found.append(f"{name} has shape {tuple(parameters[name].shape)} instead of {tuple(expected.shape)}")
            continue
        apart = (parameters[name].double() - expected.double()).norm().item()
        way = (expected.double() - reference.start[name].double()).norm().item()
        apart_total, way_total = math.hypot(apart_total, apart), math.hypot(way_total, way)
        if not apart <= limits.parameter_distance * way:
            found.append(f"{name} ends {apart:.3e} from the reference, which moved {way:.3e}")
    if not apart_total <= limits.distance * way_total:
        found.append(f"all parameters end {apart_total:.3e} from the reference, which moved {way_total:.3e}")
    assert not found, f"training differs from the reference beyond {limits}:\n  " + "\n  ".join(found)


def _series(what: str, expected: Sequence[float], got: Sequence[float], limit: float) -> list[str]:
    if len(expected) != len(got):
        return [f"{len(got)} values of {what} instead of {len(expected)}"]
    pairs = enumerate(zip(expected, got, strict=True), start=1)
    return [f"{what} of step {i}: {b!r} instead of {a!r}" for i, (a, b) in pairs if not abs(a - b) <= limit * abs(a)]
