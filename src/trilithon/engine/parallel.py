"""A model put on the mesh before it is sharded: matrices cut over tensor ranks, tokens over sequence ranks.

What follows sees an ordinary, smaller model, and a table that says where each parameter is (`placements`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from trilithon.comm.collectives import Group
from trilithon.config import TensorConfig
from trilithon.config.mesh import REPLICAS
from trilithon.contracts import ReduceOp, Tag
from trilithon.engine.topology import Topology
from trilithon.errors import ProtocolError
from trilithon.parallel import ParameterSlice
from trilithon.parallel.dropout import place_dropouts
from trilithon.parallel.sequence.modules import cut_sequences, join_sequences
from trilithon.parallel.tensor import Cutting, cut_model, share_stream
from trilithon.parallel.tensor.streams import SlicedStream
from trilithon.zero.composite import RankPlacement, Replicas
from trilithon.zero.sharding import ZeroSharding


class EqualReplicas:
    """A step hook: parameters that tensor ranks hold alike must stay equal, bit for bit, on all of them.

    Looks after 1, 2, 4, 8, ... steps: 16 bytes per parameter. A layer that computes on cut tensors without being in the
    plan gets a part of its gradient on each rank, and would drift apart unseen.
    """

    def __init__(self, sharding: ZeroSharding, parallel: Parallel) -> None:
        self._sharding, self._parallel = sharding, parallel

    def on_step(self, step: int) -> None:
        """Collective over tensor ranks. Raises ProtocolError, on all of them, that names the parameters."""
        done = step - 1
        if done < 1 or done & (done - 1):
            return
        names, sums = [], []
        for part in self._sharding.slices():
            values = part.low if part.low is not None else part.master
            for shard in part.shards if values.device.type != "meta" else ():  # values that rest elsewhere
                if shard.name not in self._parallel.apart:
                    names.append(shard.name)
                    sums.append(values[shard.offset : shard.offset + shard.numel].double().sum())
        if not sums:
            return
        mine = torch.stack(sums)
        ends = torch.cat((mine, -mine))
        self._parallel.tensor_group.all_reduce(ends, Tag("equal replicas", step=step), ReduceOp.MAX).wait()
        highest, lowest = ends[: len(sums)], -ends[len(sums) :]
        apart = [name for name, same in zip(names, ((highest == lowest) | highest.isnan()).tolist()) if not same]
        if apart:
            raise ProtocolError(
                f"after {done} steps {apart[:4]} differ between tensor ranks: they are whole, and each rank trained "
                'them with another gradient. If their layer computes on cut tensors, give it the style "summed" in '
                "tensor.plan; if ranks were fed different batches, feed by engine.mesh.data_rank."
            )


class Parallel:
    """One model on one mesh. slices: by name, the parameters that are cut over tensor ranks."""

    def __init__(
        self, model: nn.Module, topology: Topology, settings: TensorConfig, device: torch.device,
        values_of: Callable[[nn.Parameter], Tensor],
    ) -> None:  # fmt: skip
        """Collective. Raises ConfigError, before anything is communicated, for what does not divide."""
        self._model, self._topology = model, topology
        self._cutting: Cutting | None = None
        self._elsewhere: frozenset[str] = frozenset()
        if topology.sequence.world_size > 1:
            cut_sequences(model, topology.sequence)
        if topology.tensor.world_size > 1:
            try:
                self._cutting = cut_model(
                    model,
                    topology.tensor,
                    plan=settings.plan,
                    cut_norms=settings.cut_norms,
                    values_of=values_of,
                    device=device,
                )
            except BaseException:
                join_sequences(model)
                raise
        if topology.axes.world_size > 1:
            cut_norms = topology.tensor.world_size > 1 and settings.cut_norms
            tokens = ("sequence", "tensor") if cut_norms else ("sequence",)
            heads = ("tensor", "sequence")  # tensor ranks cut them first, then the exchange does
            share = {"batch": topology.part("data"), "tokens": topology.part(tokens), "heads": topology.part(heads)}
            place_dropouts(model, share)
        for group in (topology.tensor, topology.sequence, topology.pipe):
            share_stream(group, device)

    @property
    def tensor_group(self) -> Group:
        return self._topology.tensor

    @property
    def streams(self) -> list[SlicedStream]:
        """Switches between random streams, which recomputation has to put back."""
        return [self._cutting.stream] if self._cutting is not None and self._cutting.stream is not None else []

    @property
    def apart(self) -> frozenset[str]:
        """Names of parameters of which tensor ranks update different parts."""
        summed = self._cutting.summed if self._cutting is not None else frozenset()
        return frozenset(self.slices) | summed | self._elsewhere

    @property
    def staged(self) -> bool:
        """Other ranks hold other layers."""
        return self._topology.pipe.world_size > 1

    @property
    def slices(self) -> dict[str, ParameterSlice]:
        return self._cutting.slices if self._cutting is not None else {}

    def placements(
        self, others: Mapping[int, RankPlacement], elsewhere: frozenset[str] = frozenset()
    ) -> Mapping[int, RankPlacement]:
        """By id, where each parameter lives that is not on the data axis alone.

        others: of parameters that other features placed (experts), which know of tensor ranks; those without ranks of
        their own (gates) are held by all. elsewhere: names of the former.
        """
        self._elsewhere = elsewhere
        if self._cutting is None:
            return others
        topology, axes = self._topology, self._topology.axes
        gather, reduce, copies = topology.comm.gather, topology.comm.reduce, topology.tensor.world_size

        def index_of(rank: int) -> int:
            return axes.index(REPLICAS, rank)

        cut = Replicas("cut", gather, reduce, reduce.world_size, index_of)
        whole = Replicas("whole", gather, reduce, reduce.world_size, index_of, copies)
        summed = whole
        if self._cutting.summed:  # tensor ranks hold parts of these gradients: added up with those of the data axis
            everyone = topology.make_control("summed gather"), topology.make_control("summed reduce")
            summed = Replicas("summed", *everyone, reduce.world_size, lambda rank: rank)
        found = {}
        for name, param in self._model.named_parameters():
            assemble = partial(self._cutting.whole, name) if name in self.slices else None
            held = cut if name in self.slices else summed if name in self._cutting.summed else whole
            found[id(param)] = RankPlacement(held, assemble=assemble)
        for key, place in others.items():
            found[key] = place if place.replicas is not None else replace(place, replicas=whole)
        return found

    def undo(self) -> None:
        """Collective: the model as it was, with whole parameters."""
        if self._cutting is not None:
            self._cutting.undo()
        join_sequences(self._model)
        place_dropouts(self._model, None)
