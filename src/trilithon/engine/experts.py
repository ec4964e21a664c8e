"""Spreads the experts of a model's MoE layers over ranks, and tells the sharding where they are.

Each layer may have its own degree. For each distinct one there is an expert group, inside which tokens travel, and two
groups over the ranks that hold the same experts, for gathers and reductions. Experts of layers with degree 1 are on
every rank and are parameters like any other, except on a mesh with a tensor axis: there each rank computes on its share
of the tokens, so that gradients of experts add up over that axis too. (Kim et al. 2021, arXiv:2109.10465, section 3.)

Each stage of a pipeline has groups over its own ranks; all ranks make those of all stages in one order (see
`known_experts`).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from trilithon.comm.collectives import Group
from trilithon.comm.hierarchical import TwoLevel
from trilithon.config.mesh import EXPERT_RANKS, REPLICAS, Axes
from trilithon.config.moe import MoEConfig
from trilithon.contracts import Collectives, Tag
from trilithon.engine.known_experts import KnownExperts, of_all_stages
from trilithon.engine.topology import Topology
from trilithon.errors import ConfigError, ProtocolError
from trilithon.optim.tensors import Stack
from trilithon.parallel.moe.groups import ExpertAxes, resolve_ep_size
from trilithon.parallel.moe.layer import MoE
from trilithon.parallel.moe.travel import ExpertRanks
from trilithon.zero.composite import RankPlacement, Replicas
from trilithon.zero.init import built_values
from trilithon.zero.layout import Region

logger = logging.getLogger(__name__)

_ROOT = "(root)"  # a model that is a layer of experts itself, for people


@dataclass(frozen=True, eq=False)
class DegreeGroups:
    """The groups of one expert-parallel degree. ranks: how tokens travel; tokens: the group in which they do; gather,
    reduce: the ranks that hold the same experts."""

    ranks: ExpertRanks
    tokens: Group
    gather: Group
    reduce: Group


@dataclass(eq=False)
class SpreadExperts:
    """The MoE layers of one model, or of one stage of it, and the groups made for them.

    axes: by layer. mesh: where ranks are. node_size: for the exchange in two steps, None for the flat one. data_first:
    ranks with the same experts are neighbours. groups: by degree. everywhere: what the stages of a pipeline know
    together, None for a model that is whole here.
    """

    layers: dict[str, MoE] = field(default_factory=dict)
    axes: dict[str, ExpertAxes] = field(default_factory=dict)
    mesh: Axes = field(default_factory=lambda: Axes(EXPERT_RANKS, (1, 1, 1)))
    node_size: int | None = None
    data_first: bool = False
    groups: dict[int, DegreeGroups] = field(default_factory=dict)
    everywhere: KnownExperts | None = None

    @property
    def known(self) -> KnownExperts:
        """Of all layers, also those on other stages."""
        return self.everywhere if self.everywhere is not None else self._here()

    def agree(self, everyone: Collectives, refusal: str | None) -> None:
        """Collective: know what the other stages have. refusal: why this rank cannot go on; then all raise it."""
        self.everywhere = of_all_stages(self._here(), refusal, everyone)

    def _here(self) -> KnownExperts:
        return KnownExperts(
            frozenset(axes.ep_size for axes in self.axes.values()),
            any(layer.scope == "global" for layer in self.layers.values()),
            {name: [axes.ep_size, int(axes.data_first)] for name, axes in self.axes.items() if axes.ep_size > 1},
            self._stacks(),
        )

    @property
    def degrees(self) -> list[int]:
        """The distinct expert-parallel degrees above 1, on any stage."""
        return self.known.spread

    @property
    def collective(self) -> bool:
        """Some layer, on any stage, talks to other ranks: over its experts, its balance, or tokens that tensor ranks
        share out."""
        known = self.known
        shared = bool(known.degrees) and self.mesh.size("tensor") > 1
        return bool(known.spread) or shared or known.balanced

    def describe(self) -> dict[str, list[int]]:
        """Plain data: for each layer spread over ranks, on any stage, its degree and the order of ranks."""
        return dict(self.known.described)

    def table(self) -> str:
        """One line per layer: experts, degree, ranks that hold the same ones, experts on each rank."""
        rows = [["layer", "experts", "ep_size", "replicas", "experts per rank"]]
        for name, axes in self.axes.items():
            number = self.layers[name].num_experts
            numbers = (number, axes.ep_size, axes.replicas, number // axes.ep_size)
            rows.append([name or _ROOT, *map(str, numbers)])
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)

    @property
    def apart(self) -> frozenset[str]:
        """Names of the parameters whose gradients add up over other ranks than those of dense ones."""
        here = [name for name in self.layers if self.axes[name].ep_size in self.groups]
        return frozenset(whole for name in here for whole, _ in self._parameters(name))

    def placed(self) -> dict[str, int]:
        """Names of the parameters of experts that are not held as dense ones are -> the degree of their layer."""
        tensor = self.mesh.size("tensor") > 1
        wanted = {name: axes.ep_size for name, axes in self.axes.items() if axes.ep_size > 1 or tensor}
        return {whole: wanted[name] for name in wanted for whole, _ in self._parameters(name)}

    def _parameters(self, layer: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the experts of one layer, by their names in the model."""
        for own, param in self.layers[layer].experts.named_parameters():
            yield f"{layer}.experts.{own}" if layer else f"experts.{own}", param

    def spread(self, topology: Topology) -> None:
        """Collective: make the groups, and leave each rank its part of the experts, with the values of the first rank
        (of its stage)."""
        tensor = topology.tensor if topology.tensor.world_size > 1 else None
        everyone, known = topology.comm.gather, self.known
        if tensor is not None and known.degrees:
            everyone = topology.make_expert_group("experts", None)
        for degree in sorted(known.degrees) if tensor is not None else known.spread:
            axes = ExpertAxes(self.mesh.size(EXPERT_RANKS), degree, self.data_first)
            ranks, tokens = self._ranks(axes, topology, tensor)
            self.groups[degree] = DegreeGroups(
                ranks,
                tokens,
                topology.make_expert_group(f"expert gather/{degree}", axes.expert_data_groups),
                topology.make_expert_group(f"expert reduce/{degree}", axes.expert_data_groups),
            )
        statistics = None
        if topology.comm.gather.world_size > 1 and known.balanced:
            statistics = topology.make_group("balance", None)
        for name, layer in self.layers.items():
            degree = self.axes[name].ep_size
            if degree in self.groups:
                _equal_values(name, layer, everyone)
            spread = self.groups.get(degree)
            ranks = spread.ranks if spread is not None else ExpertRanks(Group(None, name="experts/1"))
            layer.bind(name or _ROOT, ranks, statistics, topology.comm.gather.rank)
        stage = topology.comm.alike if topology.comm.alike is not None else topology.comm.control
        if stage.rank == 0 and any(axes.ep_size > 1 for axes in self.axes.values()):
            logger.info("experts over ranks:\n%s", self.table())

    def _ranks(self, axes: ExpertAxes, topology: Topology, tensor: Group | None) -> tuple[ExpertRanks, Group]:
        """How tokens travel, and the group in which they do. Collective."""
        degree, levels, size = axes.ep_size, None, self.node_size
        if degree == 1:
            alone = Group(None, name="experts/1")
            return ExpertRanks(alone, tensor=tensor), alone
        group = topology.make_expert_group(f"experts/{degree}", axes.expert_groups)
        if size is not None and self.on_nodes(axes, size)[0] > 1 and self.on_nodes(axes, size)[1] > 1:
            levels = TwoLevel(
                topology.make_expert_group(f"experts/{degree} on a node", lambda ranks: axes.node_groups(ranks, size)),
                topology.make_expert_group(f"experts/{degree} on nodes", lambda ranks: axes.peer_groups(ranks, size)),
            )
        return ExpertRanks(group, levels, tensor), group

    def on_nodes(self, axes: ExpertAxes, node_size: int) -> tuple[int, int]:
        """(nodes of an expert group, its ranks on each). Raises ConfigError if they lie unevenly on nodes."""
        shapes = {axes.levels(ranks, node_size) for ranks in self.mesh.groups(EXPERT_RANKS)}
        if len(shapes) > 1:
            raise ConfigError(
                f"moe.all_to_all='hierarchical': with moe.node_size={node_size} expert groups of {axes.ep_size} ranks "
                f"lie differently on nodes: {sorted(shapes)} (nodes, ranks on each). Use 'flat'."
            )
        return shapes.pop()

    def placements(self) -> Mapping[int, RankPlacement]:
        """By id of the parameter: gates in fp32; experts on the ranks of their expert-data group."""
        found: dict[int, RankPlacement] = {}
        for name, layer in self.layers.items():
            found[id(layer.gate.weight)] = RankPlacement(keep_dtype=True)
            axes = self.axes[name]
            if axes.ep_size not in self.groups:
                continue
            groups = self.groups[axes.ep_size]
            replicas = Replicas(
                f"experts/{axes.ep_size}",
                groups.gather,
                groups.reduce,
                self.mesh.size(REPLICAS),
                lambda rank, axes=axes: axes.place(self.mesh.index(EXPERT_RANKS, rank))[1],  # type: ignore[misc]
            )
            for whole, param in self._parameters(name):
                block = tuple(param.shape)
                corner = (layer.experts.first, *[0] * (len(block) - 1))
                region = Region(whole, (layer.num_experts, *block[1:]), corner, block) if groups.ranks.spread else None
                found[id(param)] = RankPlacement(replicas, region, groups.tokens)
        return found

    def stacks(self) -> Mapping[str, Stack]:
        """By name, the parameters in which experts lie one after the other, on any stage."""
        return self.known.stacks

    def _stacks(self) -> Mapping[str, Stack]:
        found: dict[str, Stack] = {}
        for name, layer in self.layers.items():
            for whole, param in self._parameters(name):
                found[whole] = Stack(layer.num_experts, math.prod(param.shape[1:]))
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


def find_experts(model: nn.Module, mesh: Axes, settings: MoEConfig) -> SpreadExperts:
    """The MoE layers of `model`, each with its degree. Raises ConfigError for one that does not fit, by name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    node_size = _node_size(settings) if layers else None
    found = SpreadExperts(layers, mesh=mesh, node_size=node_size, data_first=settings.data_before_experts)
    number = mesh.size(EXPERT_RANKS)
    for name, layer in layers.items():
        if layer.tensor_sliced_experts and mesh.size("tensor") > 1:
            raise ConfigError(
                f"{name or _ROOT}: enable_expert_tensor_parallelism=True asks for experts cut over mesh.tensor="
                f"{mesh.size('tensor')} ranks. Leave it out: experts stay whole, and tensor ranks share out the "
                "tokens; to hold fewer experts on each, raise ep_size, which may span tensor ranks."
            )
        degree = resolve_ep_size(name or _ROOT, layer.ep_size, layer.num_experts, number)
        axes = found.axes[name] = ExpertAxes(number, degree, settings.data_before_experts)
        if found.node_size is not None and degree > 1:
            found.on_nodes(axes, found.node_size)
    return found


def _node_size(settings: MoEConfig) -> int | None:
    """Ranks on a node for the exchange in two steps; None for the flat one."""
    if settings.all_to_all == "flat":
        return None
    if settings.node_size is not None:
        return settings.node_size
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or int(local) < 1:
        raise ConfigError(
            "moe.all_to_all='hierarchical' needs to know how many ranks a node has, and LOCAL_WORLD_SIZE is "
            f"{local!r}. Set moe.node_size, or start with torchrun or `trilithon launch`."
        )
    return int(local)


def _equal_values(name: str, layer: MoE, everyone: Collectives) -> None:
    """The whole experts are rank 0's, so that it does not matter who keeps which."""
    for own, param in layer.experts.named_parameters():
        built = built_values(param)
        if built is not None:
            param.data = built
        elif not param.is_meta:
            param.data = param.data.contiguous()
            everyone.broadcast(param.data, 0, Tag(name, (own,))).wait()
