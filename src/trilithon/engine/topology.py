"""Where this rank is on the mesh, and the groups in which it talks: one for each purpose.

control   all ranks that train the model: norms, decisions, what must be agreed once a step
gather    the ranks that hold the same slice of the model (data x sequence): values
reduce    the same ranks: gradients
tensor    the ranks that hold the other slices of the same matrices
sequence  the ranks that hold the other tokens of the same samples
pipe      the ranks that hold the other layers of the same slice
alike     the ranks of one stage of a pipeline: what depends on which parameters are here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trilithon.comm.collectives import Group
from trilithon.comm.ledger import Ledger
from trilithon.comm.mesh import axes_of, make_mesh, own_process_group
from trilithon.comm.messages import Messages
from trilithon.comm.watchdog import Watchdog
from trilithon.config import Config
from trilithon.config.mesh import AXES, EXPERT_RANKS, REPLICAS, Axes
from trilithon.engine.capabilities import require_pipeline
from trilithon.errors import ConfigError
from trilithon.zero.sharding import Communicators

Split = Callable[[list[int]], list[list[int]]]


@dataclass(frozen=True)
class Topology:
    """axes: pipe, data, sequence and tensor; rank: this one's number on them.

    make_group: collective, a further group over the ranks of `gather`, or over parts of them (name, how to split them).
    make_expert_group: as that, over the ranks among which experts can be shared out.
    make_control: collective, a further group over the ranks of `control` (name). make_writers: as that, for those who
    write a checkpoint: on gloo and without a watchdog, since a disk may take longer than that one waits.
    make_tied: collective, a group over the ranks of `gather` of several stages (name, stages).
    make_messages: collective, messages along the pipe axis (name). process_groups: of this engine, which ends them.
    """

    axes: Axes
    rank: int
    comm: Communicators
    tensor: Group
    sequence: Group
    pipe: Group
    make_group: Callable[[str, Split | None], Group]
    make_expert_group: Callable[[str, Split | None], Group]
    make_control: Callable[[str], Group]
    make_writers: Callable[[], Group]
    make_tied: Callable[[str, Sequence[int]], Group]
    make_messages: Callable[[str], Messages]
    process_groups: list[dist.ProcessGroup] = field(default_factory=list)

    @property
    def data_rank(self) -> int:
        """Which of the `data_size` parts of a batch is this rank's; ranks that differ on other axes share it."""
        return self.part("data")[0]

    @property
    def data_size(self) -> int:
        return self.axes.size("data")

    def close(self) -> None:
        """End the groups, unless the whole of torch.distributed has ended before."""
        for process_group in self.process_groups:
            if dist.is_initialized() and process_group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(process_group)

    def part(self, axes: str | Sequence[str]) -> tuple[int, int]:
        """(index, number of parts) of this rank along these axes, the last one varying fastest."""
        return self.axes.index(axes, self.rank), self.axes.size(axes)


def resolve_axes(settings: Config, mesh: DeviceMesh | None) -> Axes:
    """The four axes of a run: those of a mesh that the caller made, else those of the configuration over all ranks.

    Raises ConfigError when they contradict each other, and for axes that nothing works on yet.
    """
    if mesh is None:
        axes = settings.mesh.axes(dist.get_world_size() if dist.is_initialized() else 1)
    else:
        there = axes_of(mesh)
        if "data" not in there.names and len(there.names) > 1:
            raise ConfigError(f"the mesh has the axes {there.names}; one of them must be called 'data'.")
        sizes = dict(zip(there.names, there.sizes)) if "data" in there.names else {"data": there.sizes[0]}
        axes = Axes(AXES, tuple(sizes.get(name, 1) for name in AXES))
        if settings.mesh.model_fields_set and settings.mesh.axes(axes.world_size) != axes:
            raise ConfigError(
                f"a mesh of {dict(zip(axes.names, axes.sizes))} was passed, but the configuration has mesh="
                f"{settings.mesh.model_dump(exclude_defaults=True)}; keep one of the two."
            )
    require_pipeline(axes, settings)
    return axes


def make_topology(  # noqa: PLR0917 (called once, by build)
    settings: Config, axes: Axes, mesh: DeviceMesh | None, ledger: Ledger, watchdog: Watchdog | None,
    device: torch.device,
) -> Topology:  # fmt: skip
    """Collective. axes: of `resolve_axes`. Where nobody else is on its axes, a group has no process group."""
    if mesh is None and dist.is_initialized():
        used = {name: size for name, size in zip(axes.names, axes.sizes) if size > 1 or name == "data"}
        mesh = make_mesh(used, device=device.type)
    names = tuple(mesh.mesh_dim_names or ()) if mesh is not None else ()
    known = tuple(name for name in names if name in AXES) or names
    replicas = tuple(name for name in known if name in REPLICAS) or known
    holders = tuple(name for name in known if name in EXPERT_RANKS) or known
    made: list[dist.ProcessGroup] = []

    def group(name: str, over: Sequence[str], split: Split | None = None) -> Group:
        process_group = None
        if mesh is not None and (axes.world_size == 1 or axes_of(mesh).size(over) > 1):
            process_group = own_process_group(mesh, over, settings.comm.timeout_s, split)
        if process_group is not None:
            made.append(process_group)
        return Group(
            process_group,
            name=name,
            ledger=ledger,
            watchdog=watchdog,
            shared_memory=settings.comm.shared_memory,
        )

    def writers() -> Group:
        process_group = own_process_group(mesh, known, settings.comm.timeout_s, backend="gloo")
        return Group(process_group, name="checkpoint")

    alike = group("alike", [name for name in known if name != "pipe"]) if axes.size("pipe") > 1 else None
    comm = Communicators(group("control", known), group("gather", replicas), group("reduce", replicas), alike)
    place = {name: mesh.get_local_rank(name) if mesh is not None and name in names else 0 for name in AXES}
    if mesh is not None and "data" not in names:
        place["data"] = mesh.get_local_rank()
    tensor, sequence, pipe = (
        group(name, (name,)) if axes.size(name) > 1 else Group(None, name=name)
        for name in ("tensor", "sequence", "pipe")
    )

    def tied(name: str, stages: Sequence[int]) -> Group:
        def split(ranks: list[int]) -> list[list[int]]:
            per_stage = len(ranks) // axes.size("pipe")
            inside = [rank for index, rank in enumerate(ranks) if index // per_stage in stages]
            return [inside, *([rank] for rank in ranks if rank not in inside)]

        return group(name, ("pipe", *replicas), split)

    def messages(name: str) -> Messages:
        process_group = own_process_group(mesh, "pipe", settings.comm.timeout_s)
        assert process_group is not None, "a pipeline has several ranks"
        made.append(process_group)
        return Messages(process_group, name=name, ledger=ledger, watchdog=watchdog)

    return Topology(
        axes,
        axes.rank(place),
        comm,
        tensor,
        sequence,
        pipe,
        make_group=lambda name, split: group(name, replicas, split),
        make_expert_group=lambda name, split: group(name, holders, split),
        make_control=lambda name: group(name, known),
        make_writers=writers,
        make_tied=tied,
        make_messages=messages,
        process_groups=made,
    )
