"""Spreads the experts of a model's MoE layers over the data-parallel ranks, and tells the sharding where they are.

Each layer may have its own degree. For each distinct one there is an expert group, inside which tokens travel, and two
groups over the ranks that hold the same experts, for gathers and reductions. Experts of layers with degree 1 are on
every rank and are parameters like any other. (Kim et al. 2021, arXiv:2109.10465, section 3.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from trilithon.comm.collectives import Group
from trilithon.contracts import Collectives, Tag
from trilithon.errors import ProtocolError
from trilithon.parallel.moe.groups import ExpertAxes, resolve_ep_size
from trilithon.parallel.moe.layer import MoE
from trilithon.zero.composite import RankPlacement, Replicas
from trilithon.zero.init import built_values
from trilithon.zero.layout import Region

logger = logging.getLogger(__name__)

_ROOT = "(root)"  # a model that is a layer of experts itself, for people

MakeGroup = Callable[[str, Callable[[list[int]], list[list[int]]] | None], Group]
"""(name, how to split the ranks of a data axis, None for not at all) -> this rank's group. Collective."""


@dataclass(eq=False)
class SpreadExperts:
    """The MoE layers of one model and the groups made for them."""

    layers: dict[str, MoE] = field(default_factory=dict)
    axes: dict[str, ExpertAxes] = field(default_factory=dict)  # by layer
    groups: dict[int, tuple[Group, Group, Group]] = field(default_factory=dict)  # by degree: experts, gather, reduce

    @property
    def degrees(self) -> list[int]:
        """The distinct expert-parallel degrees above 1."""
        return sorted({axes.ep_size for axes in self.axes.values()} - {1})

    def describe(self) -> dict[str, list[int]]:
        """Plain data: for each layer spread over ranks, its degree and the order of ranks."""
        return {name: [axes.ep_size, int(axes.data_first)] for name, axes in self.axes.items() if axes.ep_size > 1}

    def table(self) -> str:
        """One line per layer: experts, degree, ranks that hold the same ones, experts on each rank."""
        rows = [["layer", "experts", "ep_size", "replicas", "experts per rank"]]
        for name, axes in self.axes.items():
            number = self.layers[name].num_experts
            numbers = (number, axes.ep_size, axes.replicas, number // axes.ep_size)
            rows.append([name or _ROOT, *map(str, numbers)])
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)

    def spread(self, model: nn.Module, control: Collectives, make: MakeGroup) -> None:
        """Collective: make the groups, and leave each rank its part of the experts, with rank 0's values."""
        for degree in self.degrees:
            axes = next(axes for axes in self.axes.values() if axes.ep_size == degree)
            self.groups[degree] = (
                make(f"experts/{degree}", axes.expert_groups),
                make(f"expert gather/{degree}", axes.expert_data_groups),
                make(f"expert reduce/{degree}", axes.expert_data_groups),
            )
        statistics = None
        if control.world_size > 1 and any(layer.scope == "global" for layer in self.layers.values()):
            statistics = make("balance", None)
        for name, layer in self.layers.items():
            degree = self.axes[name].ep_size
            group: Collectives = self.groups[degree][0] if degree > 1 else Group(None, name="experts/1")
            if degree > 1:
                _equal_values(name, layer, control)
            layer.bind(name or _ROOT, group, statistics, control.rank)
        if self.degrees and control.rank == 0:
            logger.info("experts over ranks:\n%s", self.table())

    def placements(self) -> Mapping[int, RankPlacement]:
        """By id of the parameter: gates in fp32; experts on the ranks of their expert-data group."""
        found: dict[int, RankPlacement] = {}
        for name, layer in self.layers.items():
            found[id(layer.gate.weight)] = RankPlacement(keep_dtype=True)
            axes = self.axes[name]
            if axes.ep_size == 1:
                continue
            experts, gather, reduce = self.groups[axes.ep_size]
            replicas = Replicas(
                f"experts/{axes.ep_size}",
                gather,
                reduce,
                axes.data_size,
                lambda rank, axes=axes: axes.place(rank)[1],  # type: ignore[misc]
            )
            for own, param in layer.experts.named_parameters():
                block = tuple(param.shape)
                corner = (layer.experts.first, *[0] * (len(block) - 1))
                whole = f"{name}.experts.{own}" if name else f"experts.{own}"
                region = Region(whole, (layer.num_experts, *block[1:]), corner, block)
                found[id(param)] = RankPlacement(replicas, region, experts)
        return found

    def weigh(self, factor: float) -> None:
        """The loss of the backward that begins counts this much, and so do the balance losses that join it."""
        for layer in self.layers.values():
            layer.loss_factor = factor

    def refuse_uneven(self) -> None:
        """Raise ProtocolError if ranks cannot call forward a different number of times."""
        if self.degrees:
            raise ProtocolError(
                f"uneven() with experts spread over ranks (ep_size {self.degrees}): a rank that is done would leave "
                "the tokens of the others waiting. Call forward equally often, with empty batches at the end."
            )

    def unite(self) -> None:
        """Collective: every layer gets all its experts back."""
        for layer in self.layers.values():
            layer.unbind()


def find_experts(model: nn.Module, data_size: int, data_first: bool) -> SpreadExperts:
    """The MoE layers of `model`, each with its degree. Raises ConfigError for one that does not fit, by name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    found = SpreadExperts(layers)
    for name, layer in layers.items():
        degree = resolve_ep_size(name or _ROOT, layer.ep_size, layer.num_experts, data_size)
        found.axes[name] = ExpertAxes(data_size, degree, data_first)
    return found


def _equal_values(name: str, layer: MoE, control: Collectives) -> None:
    """The whole experts are rank 0's, so that it does not matter who keeps which."""
    for own, param in layer.experts.named_parameters():
        built = built_values(param)
        if built is not None:
            param.data = built
        elif not param.is_meta:
            param.data = param.data.contiguous()
            control.broadcast(param.data, 0, Tag(name, (own,))).wait()
