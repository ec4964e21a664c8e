"""How far two correct runs may drift apart, derived from rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

PrecisionName = Literal["fp32", "bf16", "fp16"]

_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}  # half the spacing at 1


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Relative limits. Distances compare how far apart two runs end with how far the reference went from its start."""

    loss: float
    grad_norm: float
    distance: float  # all parameters as one vector
    parameter_distance: float  # each parameter by itself
    rounding: float  # in addition, of the size of the weights themselves


def tolerance(precision: PrecisionName, steps: int, *, optimizer: str = "adamw", terms: int = 256) -> Tolerance:
    """The limits for `steps` steps, where a gradient element is a sum of about `terms` products. u is half the spacing
    of the precision at 1, w that of fp32.

    *Noise* n of a gradient, relative to its size. In fp32 the same sum in another order differs by about
    sqrt(terms) * u. In bf16 and fp16 both runs do the same arithmetic on the same low values, part by part, so noise
    arises only where two masters that are close round to different neighbours, 2 u apart. Up to one weight in a hundred
    is taken to do that (masters that differ by a thousandth of a spacing or so, spread over the spacing):
    2 u * sqrt(1/100).

    *Losses and norms* of one step differ by n, and through the steps before by n for each of them, which add up like a
    random walk: n (1 + sqrt(steps)).

    *Distance.* A step that is linear in the gradient (sgd) is off by e of its length, where e is 2 n in fp32 (an error
    in either run) and u in a low precision, as one side may keep the averaged gradient rounded to it. Adam and its kin
    divide two such quantities: 2 e. Errors of steps add at worst like sqrt(steps) compared with the way, which may
    turn. In a low precision elements smaller than the noise may change sides, and a rule close to the sign of the
    gradient turns them around: with a density of gradients near zero of 1 / their size, that is a part n of them,
    each off by two steps: 2 sqrt(n). In fp32 that would be less than one element of the small models this is for, and
    it is not allowed for: one wrong element is what an error at the edge of a shard looks like.

    *One parameter* has few elements, so its distance varies around that of the whole: 4 times as much is let through,
    and never more than 0.7, so that a parameter that did not train (distance 1) fails in any precision.

    *Rounding.* Each step rounds the weights to fp32, up or down when the updates differ a little: 2 w sqrt(steps) of
    the size of the weights, which matters where the way is short.

    fp16 holds gradients below 6e-5 with fewer digits: use a loss scale that lifts them above, in both runs.
    """
    unit = _ROUNDOFF[precision]
    low = precision != "fp32"
    noise = 2 * unit * math.sqrt(1 / 100) if low else math.sqrt(terms) * unit
    linear = (unit if low else 2 * noise) * math.sqrt(steps)
    distance = linear if optimizer == "sgd" else 2 * linear + (2 * math.sqrt(noise) if low else 0.0)
    return Tolerance(
        loss=noise * (1 + math.sqrt(steps)),
        grad_norm=noise * (1 + math.sqrt(steps)),
        distance=min(0.7, distance),
        parameter_distance=min(0.7, 4 * distance),
        rounding=2 * _ROUNDOFF["fp32"] * math.sqrt(steps),
    )
