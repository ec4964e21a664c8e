"""Which ranks share out the experts of a layer, and which hold the same ones. Pure arithmetic.

R ranks with expert-parallel degree EP form R / EP expert groups, inside which tokens travel, and EP expert-data groups
of R / EP ranks each, which hold the same experts. R counts the ranks of all axes but that of the pipeline: ranks of the
tensor axis, which hold slices of the dense matrices, are ranks like any other for experts, which are not cut. By
default the ranks of an expert group are neighbours (usually of one host, where tokens travel cheaply); the other order
puts the ranks with the same experts side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trilithon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExpertAxes:
    """`size` ranks as a grid of expert-data times expert-parallel ranks."""

    size: int
    ep_size: int
    data_first: bool = False  # ranks with the same experts are neighbours

    @property
    def replicas(self) -> int:
        """How many ranks hold the same experts."""
        return self.size // self.ep_size

    def place(self, index: int) -> tuple[int, int]:
        """Of the rank of this number: (place in its expert group, place among the holders of the same experts)."""
        if self.data_first:
            ep, edp = divmod(index, self.replicas)
        else:
            edp, ep = divmod(index, self.ep_size)
        return ep, edp

    def expert_groups(self, ranks: Sequence[int]) -> list[list[int]]:
        """ranks: `size` of them, in order. Each group holds every expert once, in order of its number."""
        return self._split(ranks, keep=1, order=0)

    def expert_data_groups(self, ranks: Sequence[int]) -> list[list[int]]:
        """Each group's ranks hold the same experts."""
        return self._split(ranks, keep=0, order=1)

    def node_groups(self, ranks: Sequence[int], node_size: int) -> list[list[int]]:
        """Each expert group cut by node: the ranks of a group that share one, in order."""
        return [part for group in self.expert_groups(ranks) for part in _by_node(group, node_size)]

    def peer_groups(self, ranks: Sequence[int], node_size: int) -> list[list[int]]:
        """Each expert group cut across nodes: the ranks that have the same place among those of their node."""
        found = []
        for group in self.expert_groups(ranks):
            found += [list(peers) for peers in zip(*_by_node(group, node_size))]
        return found

    def levels(self, ranks: Sequence[int], node_size: int) -> tuple[int, int]:
        """(nodes of an expert group, its ranks on each). Raises ConfigError if their numbers differ between nodes."""
        shapes = set()
        for group in self.expert_groups(ranks):
            sizes = [len(part) for part in _by_node(group, node_size)]
            if len(set(sizes)) > 1:
                raise ConfigError(
                    f"moe.all_to_all='hierarchical': with {node_size} ranks on a node, the expert group {group} has "
                    f"{sizes} of them on each. Choose an ep_size that divides {node_size} or is a multiple of it, or "
                    "'flat'."
                )
            shapes.add((len(sizes), sizes[0]))
        if len(shapes) > 1:
            raise ConfigError(
                f"moe.all_to_all='hierarchical': expert groups of {self.ep_size} ranks lie differently on nodes of "
                f"{node_size} ranks. Choose an ep_size that divides {node_size} or is a multiple of it, or 'flat'."
            )
        return shapes.pop()

    def _split(self, ranks: Sequence[int], *, keep: int, order: int) -> list[list[int]]:
        found: dict[int, dict[int, int]] = {}
        for index, rank in enumerate(ranks):
            place = self.place(index)
            found.setdefault(place[keep], {})[place[order]] = rank
        return [[members[i] for i in sorted(members)] for _, members in sorted(found.items())]


def _by_node(group: Sequence[int], node_size: int) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in group:
        nodes.setdefault(rank // node_size, []).append(rank)
    return list(nodes.values())


def resolve_ep_size(layer: str, ep_size: int | None, num_experts: int, num_ranks: int) -> int:
    """The expert-parallel degree of one layer. None: the largest divisor of `num_ranks` that also divides the experts.

    Raises ConfigError, with the name of the layer, for a degree that does not fit the ranks.
    """
    fits = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0 and num_experts % n == 0]
    if ep_size is None:
        return fits[-1]
    if num_experts % ep_size:
        raise ConfigError(f"{layer}: {num_experts} experts do not split over ep_size={ep_size} ranks; use {fits}.")
    if num_ranks % ep_size:
        raise ConfigError(
            f"{layer}: ep_size={ep_size} does not divide the {num_ranks} ranks that train the layer. With "
            f"{num_experts} experts and {num_ranks} ranks, ep_size can be {', '.join(map(str, fits))}; None takes "
            f"{fits[-1]}."
        )
    return ep_size
