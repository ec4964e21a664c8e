"""Where a gradient stopped being finite: which parameter, on which rank, how many elements.

Only asked after the ranks agreed that it happened, so that asking is collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from trilithon.kernels import count_non_finite
from trilithon.zero.sharding import ZeroSharding


@dataclass(frozen=True, slots=True)
class Found:
    """elements: non-finite ones over all ranks; parameters: (name, rank that produced or holds it)."""

    elements: int
    parameters: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        shown = ", ".join(f"'{name}' (rank {rank})" for name, rank in self.parameters[:4])
        more = f" and {len(self.parameters) - 4} more" if len(self.parameters) > 4 else ""
        return f"{self.elements} gradient elements are NaN or infinite, first in {shown or 'no parameter'}{more}"


def locate(sharding: ZeroSharding) -> Found:
    """Collective."""
    elements, names = 0.0, []
    for name, grad, copies in _gradients(sharding):
        count = count_non_finite(grad)
        if count:
            elements += count / copies
            names.append(name)
    produced = sharding.non_finite_here()
    reports = sharding.exchange((elements, names, produced), "non-finite gradients")
    every = sharding.disjoint or sharding.keeps_local
    elements = sum(report[0] for report in reports) if every else reports[0][0]
    causes = [(name, rank) for rank, (_, _, made) in enumerate(reports) for name in made]
    held = [(name, rank) for rank, (_, seen, _) in enumerate(reports) for name in seen]
    return Found(round(elements), tuple(causes or held))


def _gradients(sharding: ZeroSharding) -> Iterator[tuple[str, Tensor, int]]:
    if sharding.keeps_local:  # each rank's own gradient, whole
        yield from ((name, grad, 1) for name, grad in sharding.local.items())
        return
    for part in sharding.slices():
        for shard in part.shards:
            yield shard.name, part.grad[shard.offset : shard.offset + shard.numel], part.copies
