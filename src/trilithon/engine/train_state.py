"""What a run consists of, as tables: the resume contract, seen from the saving side.

Tensors become `Holding`s, named by parameter and range: masters and optimizer state slice by slice, frozen parameters,
buffers, the gradients of an open window, what update rules keep per rank. Everything else becomes plain data, shared or
of one rank. `engine.restore` is the other side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trilithon.checkpoint.digest import Digester
from trilithon.checkpoint.manifest import Entry, dtype_name
from trilithon.checkpoint.payload import bytes_of
from trilithon.checkpoint.save import Contents
from trilithon.checkpoint.table import Holding, Span
from trilithon.contracts import Slice
from trilithon.engine.across_stages import merged
from trilithon.engine.coordinates import in_whole, mesh_of, whole_shapes
from trilithon.engine.random_state import random_states
from trilithon.version import __version__
from trilithon.zero import window
from trilithon.zero.unit import Unit
from trilithon.zero.window import WindowPart

if TYPE_CHECKING:
    from trilithon.engine.engine import Engine


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state belongs to the run: a loader, a sampler, a hook, an object of yours. Plain data."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


def contents_of(engine: Engine, client_state: Mapping[str, Any] | None, *, frozen: bool = True) -> Contents:
    """Everything that this rank hands over to a save. Collective. frozen: parameters that nothing trains as well."""
    holdings = [*slice_holdings(engine), *named_holdings(engine), *_fixed_holdings(engine, frozen)]
    holdings += [*buffer_holdings(engine), *window_holdings(engine), *rank_state_holdings(engine)]
    settings = engine.config
    about = {
        "world_size": engine.world_size,
        "zero_stage": settings.zero.stage,
        "precision": settings.precision.kind,
        "config": settings.model_dump(mode="json"),
        "library": __version__,
    }
    return Contents(
        step=engine.steps,
        holdings=holdings,
        views=views_of(engine),
        aliases=merged(engine, aliases_of(engine.module)),
        shared=shared_state(engine) if frozen else {**shared_state(engine), "without_frozen": True},
        own=own_state(engine, client_state),
        about=about,
    )


def _fixed_holdings(engine: Engine, frozen: bool) -> Iterator[Holding]:
    return frozen_holdings(engine) if frozen else _without_elements(engine)


SAVE = "engine.save, which every rank has to call"  # what the watchdog says when one does not


# ------------------------------------------------------------------------------------------------------------ tensors
def slice_holdings(engine: Engine, *, write: bool = False) -> Iterator[Holding]:
    """Masters and the update rule's state, one holding for each slice. Every field has the same type in one group."""
    update = engine._update
    if update is None:
        return
    types: dict[int, dict[str, torch.dtype]] = {}
    replicated = engine._sharding.stage == 0
    for part in engine._sharding.slices():
        if part.group not in types:
            with update.state(part) as state:
                types[part.group] = {name: tensor.dtype for name, tensor in state.items()}
        spans = [
            Span(field, run.name, dtype, run.shape, run.start, run.numel, run.offset)
            for field, dtype in types[part.group].items()
            for shard in part.shards
            for run in in_whole(engine, shard.name, shard.shape, shard.start, shard.numel, shard.offset)
        ]
        yield Holding(part.key, tuple(spans), _opener(engine, part, write), replicated)


def _opener(engine: Engine, part: Slice, write: bool) -> Any:
    update = engine._update
    assert update is not None

    def open_() -> AbstractContextManager[Mapping[str, Tensor]]:
        return update.state(part, write=write)

    return open_


def named_holdings(engine: Engine) -> Iterator[Holding]:
    """State of whole parameters, of any shape, as other people's optimizers keep it at stage 0; the same everywhere."""
    state = named_state(engine)
    stored = _stored_fields(state)
    for name, fields in state.items():
        tensors = {field: value for field, value in fields.items() if field in stored and isinstance(value, Tensor)}
        if tensors:
            yield whole_holding(f"{name}/state", {field: (field, name) for field in tensors}, tensors, replicated=True)


def named_state(engine: Engine) -> dict[str, dict[str, Any]]:
    """{parameter: {field: value}} of an optimizer that works on whole parameters; {} for rules over slices."""
    found = engine._update.state_dict() if engine._update is not None else {}
    return dict(found["state"]) if found.get("whole") else {}


def _stored_fields(state: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Fields that have elements for some parameter, which are stored as tensors; counters go with the plain data."""
    every = [item for fields in state.values() for item in fields.items()]
    return {field for field, value in every if isinstance(value, Tensor) and value.dim() > 0}


def frozen_holdings(engine: Engine, *, write: bool = False) -> Iterator[Holding]:
    """Parameters that nothing trains: cut over ranks in units of stage 3, whole elsewhere."""
    for unit in engine._sharding.units:
        if unit.trainable:
            continue
        low, high = (0, unit.layout.padded) if unit.whole_values else unit.own
        spans = [
            Span("frozen", run.name, unit.dtype, run.shape, run.start, run.numel, run.offset)
            for p in unit.layout.pieces(low, high)
            for run in in_whole(engine, p.field.name, p.field.shape, p.start, p.numel, p.offset, p.field.region)
        ]
        yield Holding(unit.name, tuple(spans), _frozen_values(unit, write), unit.whole_values)
    for entry in engine._sharding.outside:
        assert entry.param.is_contiguous()
        values = entry.param.detach().view(-1)
        runs = in_whole(engine, entry.name, entry.param.shape, 0, values.numel(), 0, entry.region)
        found = [Span("frozen", r.name, values.dtype, r.shape, r.start, r.numel, r.offset) for r in runs]
        yield Holding(entry.name, tuple(found), _opened({"frozen": values}), True)
    yield from _without_elements(engine)


def _frozen_values(unit: Unit, write: bool) -> Any:
    @contextmanager
    def open_() -> Iterator[Mapping[str, Tensor]]:
        if unit.whole_values:
            yield {"frozen": unit.flat}
            return
        with unit.borrow_values(write=write) as values:
            yield {"frozen": values}

    return open_


def _without_elements(engine: Engine) -> Iterator[Holding]:
    """Trained parameters of size 0 are in no slice, and still belong to the model."""
    for one in engine._sharding.gradients:
        for field in one.unit.layout.fields:
            if field.numel == 0:
                span = Span("master", field.name, one.unit.master_dtype, tuple(field.shape), 0, 0, 0)
                yield Holding(field.name, (span,), _opened({}), True)


def buffer_holdings(engine: Engine) -> Iterator[Holding]:
    """Persistent buffers, each once however many names it has: those of the first rank that has them (rank 0 without a
    pipeline), and what differs from them elsewhere.

    Running statistics differ between ranks. The other ranks' are of use to the same number of ranks only.
    """
    buffers: dict[int, tuple[str, Tensor]] = {}
    for name, buffer in persistent_buffers(engine.module):
        buffers.setdefault(id(buffer), (name, buffer.detach()))
    digests = {name: _digest(buffer) for name, buffer in buffers.values()}
    everyone = engine._sharding.exchange(digests, SAVE)
    for name, buffer in buffers.values():
        leader = next(rank for rank, theirs in enumerate(everyone) if name in theirs)
        if engine.rank == leader or digests[name] != everyone[leader][name]:
            part = f"buffer/{engine.rank}" if engine.rank != leader else "buffer"
            yield whole_holding(name, {part: (part, name)}, {part: buffer}, replicated=False)


def names_here(engine: Engine) -> set[tuple[str, str]]:
    """What a checkpoint could hold for this rank, under all names: ("weights" or "buffers", name)."""
    params = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)} | set(whole_shapes(engine))
    buffers = {name for name, _ in persistent_buffers(engine.module)}
    return {("weights", name) for name in params} | {("buffers", name) for name in buffers}


def _digest(tensor: Tensor) -> list[str]:
    digester = Digester()
    digester.update(bytes_of(tensor))
    return digester.finish()


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, the buffer itself), under every name that a state dict gives it."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if name not in owner._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def window_holdings(engine: Engine) -> Iterator[Holding]:
    """Gradients that wait for the end of their accumulation window."""
    if engine._window.backwards:
        for part in window.open_parts(engine._sharding.gradients):
            yield window_holding(engine, part)


def window_holding(engine: Engine, part: WindowPart) -> Holding:
    """A rank's own sum is of its own part of a parameter; what has been reduced belongs to the whole one."""
    name, dtype = "window" if part.reduced else f"window/{engine.rank}", part.flat.dtype
    spans = [Span(name, p.field.name, dtype, tuple(p.field.shape), p.start, p.numel, p.offset) for p in part.pieces]
    if part.reduced:
        places = [(p.field.name, p.field.shape, p.start, p.numel, p.offset, p.field.region) for p in part.pieces]
        runs = [run for place in places for run in in_whole(engine, *place)]
        spans = [Span(name, run.name, dtype, run.shape, run.start, run.numel, run.offset) for run in runs]
    return Holding(f"{part.key}/{name}", tuple(spans), _opened({name: part.flat}), False)


def rank_state_holdings(engine: Engine) -> Iterator[Holding]:
    """What the update rule keeps on this rank alone."""
    for name, tensor in rank_state(engine).items():
        yield whole_holding(
            name, {"rank_state": ("rank_state", f"{engine.rank}/{name}")}, {"rank_state": tensor}, replicated=False
        )


def rank_state(engine: Engine) -> dict[str, Tensor]:
    ask = getattr(engine._update, "rank_state", None)
    return dict(ask()) if ask is not None else {}


def whole_holding(
    key: str, places: Mapping[str, tuple[str, str]], tensors: Mapping[str, Tensor], *, replicated: bool
) -> Holding:
    """Whole tensors; places: key in `tensors` -> (part, name)."""
    spans, flat = [], {}
    for field, tensor in tensors.items():
        part, name = places[field]
        spans.append(Span(part, name, tensor.dtype, tuple(tensor.shape), 0, tensor.numel(), 0))
        flat[part] = tensor.detach().reshape(-1)
    return Holding(key, tuple(spans), _opened(flat), replicated)


def _opened(tensors: Mapping[str, Tensor]) -> Any:
    @contextmanager
    def open_() -> Iterator[Mapping[str, Tensor]]:
        yield tensors

    return open_


# --------------------------------------------------------------------------------------------------------------- names
def views_of(engine: Engine) -> list[Entry]:
    """Trained weights in the type that forward reads: not stored, since they are one rounding from the masters."""
    shapes = whole_shapes(engine)
    found = {
        field.plain_name: Entry(
            "param", field.plain_name, dtype_name(one.unit.dtype), shapes[field.plain_name], of="master"
        )
        for one in engine._sharding.gradients
        for field in one.unit.layout.fields
    }
    return list(merged(engine, {name: found[name] for name in engine._sharding.names if name in found}).values())


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Second name of a tied parameter or shared buffer -> the name under which it is stored."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    every = [*module.named_parameters(remove_duplicate=False), *persistent_buffers(module)]
    for name, tensor in every:
        stored = first.setdefault(id(tensor), name)
        if stored != name:
            found[name] = stored
    return found


# ---------------------------------------------------------------------------------------------------------- plain data
def shared_state(engine: Engine) -> dict[str, Any]:
    """The same on every rank. Collective."""
    return {
        "counters": {
            "steps": engine.steps,
            "skipped_steps": engine.skipped_steps,
            "micro_steps": engine.micro_steps,
            "global_samples": engine.global_samples,
            "idle": sorted(engine._idle),
        },
        "accumulation": engine.accumulation,
        "mesh": mesh_of(engine),
        "experts": engine._experts.describe(),
        "groups": [
            {"names": list(merged(engine, dict.fromkeys(group.names))), "settings": _settings(group)}
            for group in engine._groups
        ],
        "schedule": engine._rate.state_dict() if engine._groups else None,
        "scaler": engine._precision.state_dict(),
        "seed": engine.config.seed,
    }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Masks belong to the data of a run (a sequence length, say), not to its state."""
    return {key: value for key, value in group.items() if key not in ("params", "exp_avg_mask")}


def own_state(engine: Engine, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of this rank; what is equal on all ranks is stored once."""
    own: dict[str, Any] = {
        "random": random_states(),
        "stateful": {name: one.state_dict() for name, one in stateful_of(engine).items()},
        "client_state": dict(client_state or {}),
    }
    update = engine._update
    if update is not None and engine._sharding.slices():  # a rank without slices has not seen who sat out
        state = update.state_dict()
        if "state" in state:
            state = {**state, "state": _counters(state["state"])}
        own["update"] = state
    if engine._window.backwards:
        open_ = engine._window
        own["window"] = {
            "backwards": open_.backwards,
            "loss": float(open_.loss),
            "weight": open_.weight,
            "scale": engine.loss_scale,
            **window.describe(engine._sharding.gradients),
        }
    return own


def _counters(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    stored = _stored_fields(state)
    return {
        name: {field: value for field, value in fields.items() if field not in stored} for name, fields in state.items()
    }


def stateful_of(engine: Engine) -> dict[str, Stateful]:
    """What was registered, and hooks that have state, under "hook/<class>" (a second one of a class: "#2")."""
    found: dict[str, Stateful] = dict(engine.stateful)
    for hook in engine.hooks:
        if isinstance(hook, Stateful):
            name = f"hook/{type(hook).__name__}"
            count = sum(1 for other in found if other == name or other.startswith(f"{name}#"))
            found[name if not count else f"{name}#{count + 1}"] = hook
    return found
