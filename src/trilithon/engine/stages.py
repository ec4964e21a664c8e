"""A model put on the pipe axis of the mesh before it is sharded: each rank keeps the layers of its stage.

What follows sees an ordinary, smaller model whose parameters have the names of the whole one, and a table that says
where the parameters are that several stages share (`placements`): their gradients are summed over all copies and
divided by the data-parallel ranks, and ZeRO cuts their state over all of them, so that copies cannot drift apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trilithon.checkpointing import recomputed
from trilithon.config import Axes, Config
from trilithon.engine.topology import Topology, resolve_axes
from trilithon.errors import ConfigError
from trilithon.parallel.pipeline import Elsewhere, Layer, PipelineModule
from trilithon.parallel.pipeline.layers import drop_layers, layers_of, shared_parameters
from trilithon.parallel.pipeline.plan import StagePlan, plan_stages
from trilithon.parallel.pipeline.schedule import Orders, make_orders
from trilithon.parallel.pipeline.stage import Again, Stage
from trilithon.zero.composite import RankPlacement, Replicas
from trilithon.zero.init import builder_of

logger = logging.getLogger(__name__)

_HELD = ("data", "sequence")  # ranks of one stage and tensor slice that hold the same


@dataclass(frozen=True)
class Staged:
    """One model on the pipe axis. chosen: names of blocks to recompute that are on this stage."""

    model: nn.Module
    plan: StagePlan
    layers: Sequence[Layer]
    settings: Config

    @property
    def stage(self) -> Stage:
        interval = self.settings.pipeline.recompute_interval
        classes: Sequence[str] | None = None
        again: Again = _again
        if isinstance(self.model, PipelineModule):
            interval = interval or self.model.activation_checkpoint_interval
            classes = self.model.checkpointable_layers
            if self.model.activation_checkpoint_func is not None:
                again = _asked_way(self.model.activation_checkpoint_func)
        return Stage(self.layers, self.plan, interval=interval, again=again, recomputable=classes)

    @property
    def dynamic_shape(self) -> bool:
        return self.settings.pipeline.dynamic_shape or bool(getattr(self.model, "dynamic_shape", False))

    def orders(self, micros: int) -> Orders:
        schedule = self.settings.pipeline.schedule if self.plan.stages > 1 else "1f1b"
        return make_orders(schedule, self.plan.stages, micros, self.plan.chunks)

    def here(self, blocks: Sequence[str]) -> list[str]:
        """Which of these modules of the whole model are on this stage."""
        modules = dict(self.model.named_modules())
        return [name for name in blocks if name in modules and not isinstance(modules[name], Elsewhere)]

    def placements(self, topology: Topology, others: Mapping[int, RankPlacement]) -> Mapping[int, RankPlacement]:
        """By id, where each parameter lives. Collective. others: what tensor slices and experts said before."""
        if self.plan.stages == 1:
            return others
        gather, reduce, axes = topology.comm.gather, topology.comm.reduce, topology.axes
        own = Replicas("stage", gather, reduce, reduce.world_size, lambda rank: axes.index(_HELD, rank))
        groups = {
            stages: (topology.make_tied(f"tied {stages} gather", stages), topology.make_tied(f"tied {stages}", stages))
            for stages in self.plan.ties
        }
        tied: dict[tuple[str, tuple[int, ...]], Replicas] = {}
        found = {}
        for name, param in self.model.named_parameters():
            place, stages = others.get(id(param), RankPlacement()), self.plan.stages_of(name)
            replicas = place.replicas or own
            if len(stages) > 1:
                if replicas.name == "summed":
                    raise ConfigError(
                        f"parameter '{name}' is shared by stages {list(stages)}, and tensor ranks hold parts of its "
                        "gradient. Leave tensor.cut_norms out, or do not share it."
                    )
                if (replicas.name, stages) not in tied:
                    tied[replicas.name, stages] = _on_stages(replicas, stages, axes, groups[stages])
                replicas = tied[replicas.name, stages]
            found[id(param)] = replace(place, replicas=replicas)
        return found


def _on_stages(replicas: Replicas, stages: tuple[int, ...], axes: Axes, groups: tuple[Any, Any]) -> Replicas:
    """The same for parameters of which several stages have a copy: a rank's gradient is a part of their sum."""

    def index_of(rank: int) -> int:
        members = axes.group_of(("pipe", *_HELD), rank)
        inside = [member for member in members if axes.coordinates(member)["pipe"] in stages]
        return inside.index(rank) if rank in inside else 0

    return Replicas(f"{replicas.name} of stages {stages}", *groups, replicas.divisor, index_of, replicas.counted)


def _again(function: Callable[[Any], Any], x: Any) -> Any:
    return recomputed(function, x)


def _asked_way(func: Callable[..., Any]) -> Callable[[Callable[[Any], Any], Any], Any]:
    """activation_checkpoint_func(function, *tensors), where `function` takes the tensors of a tuple one by one."""

    def again(function: Callable[[Any], Any], x: Any) -> Any:
        if isinstance(x, tuple):
            return func(lambda *values: function(values), *x)
        return func(function, x)

    return again


def wants_stages(model: nn.Module, settings: Config, mesh: DeviceMesh | None) -> bool:
    on_mesh = mesh is not None and "pipe" in (mesh.mesh_dim_names or ())
    return isinstance(model, PipelineModule) or settings.mesh.pipe > 1 or on_mesh


def with_stages(model: nn.Module, settings: Config, mesh: DeviceMesh | None) -> Config:
    """The settings with the number of stages that the model asks for. Raises ConfigError when they contradict."""
    if not isinstance(model, PipelineModule) or model.num_stages == 1 or mesh is not None:
        return settings
    if settings.mesh.pipe not in (1, model.num_stages):
        raise ConfigError(
            f"the model was made for {model.num_stages} stages and mesh.pipe is {settings.mesh.pipe}. Leave one of "
            "num_stages and mesh.pipe out."
        )
    changed = settings.mesh.model_copy(update={"pipe": model.num_stages})
    return settings.model_copy(update={"mesh": changed})


def cut(model: nn.Module, settings: Config, mesh: DeviceMesh | None) -> Staged:
    """Leave this rank the layers of its stage. The process group must be there; nothing is communicated.

    Raises ConfigError, on every rank alike, for a model that is no list of layers or has too few of them.
    """
    axes = resolve_axes(settings, mesh)
    stages, chunks = axes.size("pipe"), settings.pipeline.chunks_per_stage
    if settings.recompute is not None and isinstance(model, PipelineModule):
        raise ConfigError(
            "recompute chooses blocks by their place in a list of modules, and a PipelineModule is one itself. Use "
            "pipeline.recompute_interval, or activation_checkpoint_interval of PipelineModule."
        )
    if settings.zero.stage == 3 and stages == 1 and axes.world_size > 1:
        raise ConfigError(
            "the layers of a PipelineModule are called one by one, and zero.stage=3 gathers parameters when a whole "
            "model is called. Use zero.stage 0, 1 or 2, or give the layers as a torch.nn.Sequential."
        )
    stage = _stage_here(axes, mesh)
    if stages == 1:
        chunks = 1
    elif chunks > 1 and settings.pipeline.schedule != "interleaved":
        raise ConfigError(
            f"pipeline.chunks={chunks} needs pipeline.schedule='interleaved'; it is {settings.pipeline.schedule!r}."
        )
    built = [name for name, param in model.named_parameters() if builder_of(param) is not None]
    if built and stages > 1:
        raise ConfigError(
            f"{built[:2]} were built under zero.init, which cuts them over all ranks, and mesh.pipe={stages} gives "
            "ranks different layers. Build the model with LayerSpecs in a PipelineModule, where a stage builds its own."
        )
    if isinstance(model, PipelineModule):
        if settings.pipeline.partition is not None:
            model.partition_method = settings.pipeline.partition
        plan, layers = model.cut(stages, stage, chunks), model.pipeline_layers()
    else:
        layers = layers_of(model)
        plan = plan_stages(
            layers, settings.pipeline.partition or "parameters", stages, stage, chunks, shared_parameters(model, layers)
        )
        drop_layers(model, layers, plan.kept)
    return Staged(model, plan, layers, settings)


def _stage_here(axes: Axes, mesh: DeviceMesh | None) -> int:
    if mesh is not None:
        return int(mesh.get_local_rank("pipe")) if "pipe" in (mesh.mesh_dim_names or ()) else 0
    return axes.coordinates(dist.get_rank() if dist.is_initialized() else 0)["pipe"]


def move(value: Any, device: torch.device, low: torch.dtype | None) -> Any:
    """Inputs where and as the first layer wants them."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point() and low is not None:
        return value.to(device, low)
    return value.to(device)
