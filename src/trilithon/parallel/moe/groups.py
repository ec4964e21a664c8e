"""Which data-parallel ranks share out the experts of a layer, and which hold the same ones. Pure arithmetic.

D ranks with expert-parallel degree EP form D / EP expert groups, inside which tokens travel, and EP expert-data groups
of D / EP ranks each, which hold the same experts. By default the ranks of an expert group are neighbours (usually of
one host, where tokens travel cheaply); the other order puts the ranks with the same experts side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trilithon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExpertAxes:
    """The data axis of D = `data_size` ranks as a grid of expert-data times expert-parallel ranks."""

    data_size: int
    ep_size: int
    data_first: bool = False  # ranks with the same experts are neighbours

    @property
    def replicas(self) -> int:
        """How many ranks hold the same experts."""
        return self.data_size // self.ep_size

    def place(self, index: int) -> tuple[int, int]:
        """Of a rank on the data axis: (place in its expert group, place among the holders of the same experts)."""
        if self.data_first:
            ep, edp = divmod(index, self.replicas)
        else:
            edp, ep = divmod(index, self.ep_size)
        return ep, edp

    def expert_groups(self, ranks: Sequence[int]) -> list[list[int]]:
        """ranks: of one data axis, in order. Each group holds every expert once, in order of its number."""
        return self._split(ranks, keep=1, order=0)

    def expert_data_groups(self, ranks: Sequence[int]) -> list[list[int]]:
        """Each group's ranks hold the same experts."""
        return self._split(ranks, keep=0, order=1)

    def _split(self, ranks: Sequence[int], *, keep: int, order: int) -> list[list[int]]:
        found: dict[int, dict[int, int]] = {}
        for index, rank in enumerate(ranks):
            place = self.place(index)
            found.setdefault(place[keep], {})[place[order]] = rank
        return [[members[i] for i in sorted(members)] for _, members in sorted(found.items())]


def resolve_ep_size(layer: str, ep_size: int | None, num_experts: int, data_size: int) -> int:
    """The expert-parallel degree of one layer. None: the largest divisor of `data_size` that also divides the experts.

    Raises ConfigError, with the name of the layer, for a degree that does not fit the ranks.
    """
    fits = [n for n in range(1, data_size + 1) if data_size % n == 0 and num_experts % n == 0]
    if ep_size is None:
        return fits[-1]
    if num_experts % ep_size:
        raise ConfigError(f"{layer}: {num_experts} experts do not split over ep_size={ep_size} ranks; use {fits}.")
    if data_size % ep_size:
        raise ConfigError(
            f"{layer}: ep_size={ep_size} does not divide the {data_size} data-parallel ranks. With {num_experts} "
            f"experts and {data_size} ranks, ep_size can be {', '.join(map(str, fits))}; None takes {fits[-1]}."
        )
    return ep_size
