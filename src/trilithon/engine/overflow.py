"""Where a gradient stopped being finite: which parameter, on which rank, how many elements.

Only asked after the ranks agreed that it happened, so that asking is collective.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    for part in sharding.slices():
        for shard in part.shards:
            count = count_non_finite(part.grad[shard.offset : shard.offset + shard.numel])
            if count:
                elements += count / part.copies
                names.append(shard.name)
    produced = sharding.non_finite_here()
    reports = sharding.exchange((elements, names, produced), "non-finite gradients")
    elements = sum(report[0] for report in reports) if sharding.disjoint else reports[0][0]
    causes = [(name, rank) for rank, (_, _, made) in enumerate(reports) for name in made]
    held = [(name, rank) for rank, (_, seen, _) in enumerate(reports) for name in seen]
    return Found(round(elements), tuple(causes or held))
