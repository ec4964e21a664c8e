"""Where configuration becomes objects: the only file that asks which feature is on.

`initialize` reads the configuration, checks that its parts go together, joins the process group that the environment
describes, and hands an Engine the parts it sequences. Everything after it just runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trilithon.checkpointing import Recompute, ReportTimes, chosen_blocks
from trilithon.comm.ledger import Ledger
from trilithon.comm.mesh import init_distributed, rendezvous_store
from trilithon.comm.watchdog import Watchdog
from trilithon.config import Axes, Bf16, Config, Fp16, Fp32
from trilithon.contracts import Precision, Tag, Update
from trilithon.engine import capabilities, expert_capabilities, parameter_tier, state_tier
from trilithon.engine.allocator import keep_freed_memory
from trilithon.engine.engine import Engine
from trilithon.engine.experts import SpreadExperts, find_experts
from trilithon.engine.monitor import Monitor
from trilithon.engine.parallel import EqualReplicas, Parallel
from trilithon.engine.parts import Parts
from trilithon.engine.pipelined import Pipelined
from trilithon.engine.stages import Staged, cut, wants_stages, with_stages
from trilithon.engine.topology import Topology, make_topology, resolve_axes
from trilithon.errors import ConfigError, ProtocolError
from trilithon.optim.build import make_update
from trilithon.optim.groups import AnyOptimizer, OptimizerSettings, groups_of
from trilithon.optim.groups import Group as ParameterGroup
from trilithon.optim.learning_rate import AnySchedule, LearningRate
from trilithon.optim.link import Link
from trilithon.optim.loss_scale import DynamicScale, NoScale, StaticScale
from trilithon.parallel.pipeline import PipelineModule
from trilithon.zero.composite import RankPlacement
from trilithon.zero.grouping import FROZEN, regions_of
from trilithon.zero.init import built_values
from trilithon.zero.masters import Placement
from trilithon.zero.materialize import materialize_meta
from trilithon.zero.sharded_parameter import ShardedParameter, find_owner
from trilithon.zero.sharding import Communicators, Precisions, ZeroSharding
from trilithon.zero.tiling import TiledLinear, tile

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def initialize(
    model: nn.Module,
    config: Config | Mapping[str, Any] | Path | str | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    lr_schedule: AnySchedule = None,
    mesh: DeviceMesh | None = None,
    *,
    parameters: Iterable[Any] | None = None,
) -> Engine:
    """Make an Engine that trains `model` as `config` says. Collective when several ranks run.

    model: any nn.Module; its parameters are taken over (cast, cut, made equal to rank 0's), its class is not changed.
    config: a file, a dict, a Config, or a DeepSpeed file or dict; None for the defaults.
    optimizer: a torch optimizer over the model's parameters, or a class or function that makes one from parameters;
        None to take `config.optimizer`. With neither the engine only runs forwards.
    lr_schedule: a torch scheduler over that optimizer, or a function from step to rate; None for `config.lr_schedule`.
    mesh: a DeviceMesh with an axis "data", or of one axis; None for `config.mesh`. parameters: groups for
        `config.optimizer` or an optimizer class, as torch.optim takes them.
    Raises ConfigError for every setting that does not fit, before anything is communicated, and ProtocolError for a
    model that another engine still trains.
    """
    settings = Config.load(config if config is not None else {})
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; initialize() takes a torch.nn.Module.")
    if optimizer is not None and settings.optimizer is not None:
        raise ConfigError(
            f"an optimizer was passed to initialize() and the configuration has optimizer.kind="
            f"{settings.optimizer.kind!r}; keep one of the two."
        )
    chosen: AnyOptimizer | None = optimizer if optimizer is not None else settings.optimizer
    schedule = lr_schedule if lr_schedule is not None else settings.lr_schedule
    _check(settings, chosen, schedule)
    _refuse_taken(model)
    _refuse_tiles(model, chosen)
    settings = with_stages(model, settings, mesh)
    by_block = settings.recompute is not None and not isinstance(model, PipelineModule)
    blocks = chosen_blocks(model, settings.recompute) if by_block and settings.recompute is not None else []
    staged = None
    if wants_stages(model, settings, mesh):
        init_distributed(settings.comm.backend, settings.comm.timeout_s)
        staged = cut(model, settings, mesh)
        blocks = staged.here(blocks)
    groups = groups_of(model, chosen, parameters) if chosen is not None else []
    if chosen is not None and settings.offload.state != "device":
        state_tier.require_known(chosen, groups)
    init_distributed(settings.comm.backend, settings.comm.timeout_s)
    device = _device()
    if device.type == "cpu":
        keep_freed_memory(keep=settings.offload.parameters == "device")
    ledger = Ledger()
    axes = resolve_axes(settings, mesh)
    capabilities.require_no_tiles(axes, settings.zero)
    capabilities.require_whole_inputs(axes, settings)
    if isinstance(chosen, OptimizerSettings):
        capabilities.require_rule_for_mesh(chosen.kind, axes)
    experts, refusal = _experts(model, settings, axes, chosen, staged)
    topology = make_topology(settings, axes, mesh, ledger, _watchdog(settings), device)
    comm = topology.comm
    if topology.pipe.world_size > 1:
        experts.agree(comm.control, refusal)
    batch = settings.resolve_batch(axes.size("data"))
    if staged is not None:
        staged.orders(batch.accumulation)  # raises ConfigError for numbers that the schedule cannot do
    monitor = _monitor(settings, comm)
    materialize_meta(model, device)
    parallel = Parallel(model, topology, settings.tensor, device, _whole_values)
    placement = _placement(settings, model, chosen, groups, comm, device)
    try:
        experts.spread(topology)
        places = parallel.placements(experts.placements(), experts.apart)
        if staged is not None:
            places = staged.placements(topology, places)
        sharding = _sharding(model, groups, settings, comm, batch.accumulation, device, placement, places)
    except BaseException:
        _close(placement)
        raise
    if monitor is not None:
        monitor.details = sharding.bytes
    try:
        update = _update(chosen, groups, sharding, comm, device, placement, experts, parallel)
    except ConfigError:  # raised alike on every rank: the caller gets an ordinary model back
        sharding.close()
        experts.unite()
        parallel.undo()
        _close(placement)
        raise
    recompute = None
    if settings.recompute is not None:
        recompute = Recompute(model, blocks, settings.recompute, group=topology.tensor, streams=parallel.streams)
    parts = Parts(
        config=settings,
        batch=batch,
        device=device,
        sharding=sharding,
        update=update,
        precision=_precision(settings),
        rate=LearningRate(groups, schedule),
        groups=groups,
        ledger=ledger,
        topology=topology,
        parallel=parallel,
        monitor=monitor,
        experts=experts,
        pipelined=_pipelined(staged, topology, device, experts),
        tiled=_tiles(settings),
        recompute=recompute,
        low=_low(settings) if getattr(settings.precision, "cast_inputs", False) else None,
    )
    engine = Engine(model, parts)
    if parallel.slices and not settings.offload.delayed_update:  # values that move meanwhile cannot be compared
        engine.hooks.append(EqualReplicas(sharding, parallel))
    if recompute is not None and settings.recompute is not None and settings.recompute.profile:
        engine.hooks.append(ReportTimes(recompute.boundary, engine.rank))
    return engine


def _experts(
    model: nn.Module, settings: Config, axes: Axes, chosen: AnyOptimizer | None, staged: Staged | None
) -> tuple[SpreadExperts, str | None]:
    """The layers of experts that are here, and why they cannot be trained so: one stage of a pipeline must not raise
    by itself, since the others wait for it. Without stages it raises ConfigError."""
    try:
        experts = find_experts(model, axes, settings.moe)
        if experts.layers:
            expert_capabilities.require_mesh_for_experts(settings, axes)
        if isinstance(chosen, OptimizerSettings):
            expert_capabilities.require_rule_for_experts(chosen.kind, experts.degrees)
        if staged is not None:
            expert_capabilities.require_experts_on_one_stage(experts.placed(), staged.plan.stages_of)
    except ConfigError as error:
        if axes.size("pipe") == 1:
            raise
        return SpreadExperts(), str(error)
    return experts, None


def _whole_values(param: nn.Parameter) -> torch.Tensor:
    """Of a parameter on its way into the engine. Collective for one that was built under zero.init."""
    built = built_values(param)
    return param.data if built is None else built


def _check(settings: Config, optimizer: AnyOptimizer | None, schedule: object) -> None:
    if optimizer is None and schedule is not None:
        raise ConfigError("a learning-rate schedule was given, but no optimizer: pass one, or set config.optimizer.")
    kind = None if optimizer is None else optimizer.kind if isinstance(optimizer, OptimizerSettings) else "foreign"
    capabilities.require_compatible(capabilities.features_of(settings, kind))


def _refuse_taken(model: nn.Module) -> None:
    """A parameter is a view of one engine's buffers, so another engine cannot train it. (A notebook cell run twice.)"""
    for name, param in model.named_parameters():
        if isinstance(find_owner(param), ZeroSharding) and (param.requires_grad or isinstance(param, ShardedParameter)):
            raise ProtocolError(
                f"parameter '{name}' belongs to an engine that was not closed. Call close() on that engine before this "
                "model gets another one, or build the model anew."
            )


def _refuse_tiles(model: nn.Module, optimizer: AnyOptimizer | None) -> None:
    """A rule that communicates itself has whole parameters under their plain names in mind."""
    kind = optimizer.kind if isinstance(optimizer, OptimizerSettings) else "foreign"
    tiled = [name for name, module in model.named_modules() if isinstance(module, TiledLinear)]
    if tiled and capabilities.Capability.WHOLE_GRADIENTS in capabilities.update_rule(kind).needs:
        raise ConfigError(
            f"optimizer {kind} averages momenta of whole weights, and {tiled[:4]} were cut into tiles. Undo it with "
            "trilithon.zero.untile(model), or use an uncompressed optimizer."
        )


def _device() -> torch.device:
    """The GPU that the launcher gave this rank, else the one that the program chose; it is the current one from now."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank:
        torch.cuda.set_device(int(local_rank) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


@dataclass
class _Process:
    """One watchdog serves all engines of a process; it lives as long as the process group."""

    watchdog: Watchdog | None = None
    store: Any = None


_PROCESS = _Process()


def report_failure(error: BaseException) -> None:
    """For a program that catches what it fails with: the ranks that wait for this one learn the reason at once.

    An exception that is not caught reaches them by itself. Returns once the table is printed, or after seconds.
    """
    if _PROCESS.watchdog is not None:
        _PROCESS.watchdog.report_failure(error)


def is_hopeless() -> bool:
    """Whether a rank has failed or is lost, as far as this one knows, so that no step can end any more."""
    return _PROCESS.watchdog is not None and _PROCESS.watchdog.hopeless


def _watchdog(settings: Config) -> Watchdog | None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = rendezvous_store()
    if _PROCESS.watchdog is None or _PROCESS.store is not store:
        _PROCESS.watchdog = Watchdog(settings.comm.wait_limit_s, store, dist.get_rank(), dist.get_world_size())
        _PROCESS.store = store
    _PROCESS.watchdog.wait_limit_s = settings.comm.wait_limit_s  # that of the newest engine
    return _PROCESS.watchdog


def _monitor(settings: Config, comm: Communicators) -> Monitor | None:
    """What the configuration asks to be recorded; None when it says nothing about it. Collective."""
    if not settings.monitor.model_fields_set:
        return None
    monitor, refusal = None, None
    try:
        monitor = Monitor(settings.monitor, rank=comm.control.rank)
    except ConfigError as error:
        refusal = str(error)
    refusals = [text for text in comm.control.all_gather_object(refusal, Tag("monitor")) if text]
    if refusals:  # met by the rank that writes; all ranks stop with it
        raise ConfigError(refusals[0])
    return monitor


def _low(settings: Config) -> torch.dtype | None:
    match settings.precision:
        case Bf16():
            return torch.bfloat16
        case Fp16():
            return torch.float16
    return None


def _sharding(  # noqa: PLR0917 (called once, with everything that build has made)
    model: nn.Module, groups: list[ParameterGroup], settings: Config, comm: Communicators, accumulation: int,
    device: torch.device, placement: Placement | None, places: Mapping[int, RankPlacement],
) -> ZeroSharding:  # fmt: skip
    names = {name: index for index, group in enumerate(groups) for name in group.names}
    tiled = tile(model, settings.zero.tile_above_numel, modules=settings.zero.tile_modules) if _tiles(settings) else []
    plain = {key: region.name for key, region in regions_of(model).items()} if tiled else {}
    group_of = {
        id(param): names.get(plain.get(id(param), name), names.get(name, FROZEN))
        for name, param in model.named_parameters()
    }
    low = _low(settings)
    wanted = settings.zero.accumulate_dtype
    accumulate = _DTYPES[wanted] if wanted else (torch.float32 if accumulation > 1 and low else None)
    wire = _DTYPES[settings.zero.comm_dtype] if settings.zero.comm_dtype else None
    if device.type != "cpu":
        _move_buffers(model, device)
    precisions = Precisions(low, wire, accumulate)
    stores = parameter_tier.open_stores(settings.offload, comm.control, device)
    return ZeroSharding(
        model, lambda param: group_of[id(param)], settings.zero, comm, precisions, device, placement, stores, places
    )


def _tiles(settings: Config) -> bool:
    return settings.zero.tile_above_numel is not None and settings.zero.stage == 3


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Parameters follow unit by unit: whole, they need not fit on the device."""
    moved: dict[torch.Tensor, torch.Tensor] = {}  # by identity: a buffer that several modules share stays shared
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]


def _update(  # noqa: PLR0917 (called once, with everything that build has made)
    optimizer: AnyOptimizer | None, groups: list[ParameterGroup], sharding: ZeroSharding, comm: Communicators,
    device: torch.device, placement: Placement | None, experts: SpreadExperts, parallel: Parallel,
) -> Update | None:  # fmt: skip
    if optimizer is None:
        return None
    store = placement.store if placement is not None else None
    whole = sharding.stage == 0
    complete = whole or comm.reduce.world_size == 1
    link = Link(comm.reduce, sharding.local.items, sharding.local.shapes(), complete, device)
    names, stacks = sharding.trainable_names, experts.stacks()
    if experts.degrees:  # a rank's block of the experts is not a whole parameter, and they are not on all ranks
        way_out = "Keep whole experts on every rank (ep_size=1, at zero.stage=0)"
        return make_update(optimizer, groups, names, device=device, store=store, way_out=way_out, stacks=stacks)
    if parallel.slices:  # nor is a slice of a matrix
        way_out = "Keep whole matrices on every rank (mesh.tensor=1, at zero.stage=0)"
        return make_update(optimizer, groups, names, device=device, store=store, way_out=way_out, stacks=stacks)
    if parallel.staged:  # nor are the parameters here all there are
        way_out = "Keep the whole model on every rank (mesh.pipe=1, at zero.stage=0)"
        return make_update(optimizer, groups, names, device=device, store=store, way_out=way_out, stacks=stacks)
    return make_update(optimizer, groups, names, whole=whole, device=device, store=store, link=link, stacks=stacks)


def _placement(  # noqa: PLR0917 (called once, with everything that build has made)
    settings: Config, model: nn.Module, optimizer: AnyOptimizer | None, groups: list[ParameterGroup],
    comm: Communicators, device: torch.device,
) -> Placement | None:  # fmt: skip
    """Where masters and optimizer state rest; None on the device."""
    if optimizer is None or settings.offload.state == "device":
        return None
    needs = state_tier.needs_of(model, optimizer, groups, comm.gather.world_size)
    return state_tier.make_placement(settings.offload, needs, comm.control, device)


def _pipelined(
    staged: Staged | None, topology: Topology, device: torch.device, experts: SpreadExperts
) -> Pipelined | None:
    if staged is None:
        return None
    alone = topology.tensor.world_size == topology.sequence.world_size == 1 and not experts.collective
    return Pipelined(staged, topology, device, tolerant=alone)


def _close(placement: Placement | None) -> None:
    if placement is not None:
        placement.store.close()


def _precision(settings: Config) -> Precision:
    match settings.precision:
        case Fp16(loss_scale=0.0) as fp16:
            return DynamicScale(
                2.0**fp16.initial_scale_power,
                window=fp16.window,
                hysteresis=fp16.hysteresis,
                consecutive_hysteresis=fp16.consecutive_hysteresis,
                min_scale=fp16.min_scale,
                max_scale=fp16.max_scale,
                give_up_after=fp16.give_up_after,
            )
        case Fp16() as fp16:
            return StaticScale(fp16.loss_scale, give_up_after=fp16.give_up_after)
        case Fp32() | Bf16() as plain:
            return NoScale(plain.non_finite)
    raise AssertionError(settings.precision)
