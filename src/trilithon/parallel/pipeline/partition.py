"""Which layers go to which stage: weights cut into contiguous parts so that the heaviest is as light as can be.

Pure arithmetic, the same on every rank. Where several cuts are equally good, the later stages get the lighter parts:
the first ones keep more micro-batches alive.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trilithon.errors import ConfigError


def cut_by_weight(weights: Sequence[float], parts: int) -> list[int]:
    """Bounds [0, ..., len(weights)] of `parts` contiguous parts, none empty, with the smallest possible maximum.

    Raises ConfigError when there are fewer layers than parts, or a weight is negative.
    """
    if len(weights) < parts:
        raise ConfigError(
            f"{len(weights)} layers do not make {parts} stages with a layer each: use at most {len(weights)} stages "
            "(times chunks), or cut the model into more layers."
        )
    if any(weight < 0 for weight in weights):
        raise ConfigError(f"weights of layers must not be negative; got {min(weights)}.")
    limit = _smallest_maximum(weights, parts)
    bounds, total = [0], 0.0
    for index, weight in enumerate(weights):
        open_part = index > bounds[-1]
        must = len(weights) - index == parts - len(bounds)  # what is left makes one layer for each other part
        if len(bounds) < parts and open_part and (must or total + weight > limit):
            bounds.append(index)
            total = 0.0
        total += weight
    return [*bounds, len(weights)]


def _smallest_maximum(weights: Sequence[float], parts: int) -> float:
    """The least possible weight of the heaviest part, grown part by part: best[i] is that of the first i layers."""
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    count = len(weights)
    best = sums[:]
    for part in range(2, parts + 1):
        fresh = [float("inf")] * (count + 1)
        for stop in range(part, count + 1):
            fresh[stop] = min(max(best[at], sums[stop] - sums[at]) for at in range(part - 1, stop))
        best = fresh
    return best[count] * (1 + 1e-12)  # sums taken in another order round differently


def weights_by_method(method: str, parameters: Sequence[int], classes: Sequence[str]) -> list[float]:
    """One weight per layer. method: "uniform", "parameters" or "type:<regex>".

    parameters: trainable elements of each layer; classes: the name of each layer's class, which the expression is
    searched in without regard to case. Raises ConfigError for another method, or one that weighs nothing.
    """
    kind, _, pattern = method.partition(":")
    if kind == "uniform" and not pattern:
        return [1.0] * len(classes)
    if kind == "parameters" and not pattern:
        return [float(number) for number in parameters] if any(parameters) else [1.0] * len(classes)
    if kind == "type" and pattern:
        try:
            found = [float(re.search(pattern, name, re.IGNORECASE) is not None) for name in classes]
        except re.error as error:
            raise ConfigError(f"partition_method={method!r} is not a regular expression: {error}.") from None
        if not any(found):
            raise ConfigError(
                f"partition_method={method!r} fits no layer; their classes are {', '.join(sorted(set(classes)))}."
            )
        return found
    raise ConfigError(
        f"partition_method={method!r}: there are 'parameters', 'uniform' and 'type:<regex>'; or pass a weight for each "
        "layer, such as the seconds of trilithon.parallel.pipeline.layer_seconds."
    )
