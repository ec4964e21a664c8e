"""Whole tensors out of a cut engine, one at a time: for tools, tests and small models."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trilithon.contracts import Slice
from trilithon.engine.across_stages import across_stages, merged
from trilithon.engine.coordinates import Run, in_whole, whole_shapes
from trilithon.engine.train_state import persistent_buffers
from trilithon.errors import ProtocolError
from trilithon.zero.unit import Unit

if TYPE_CHECKING:
    from trilithon.engine.engine import Engine


def view(engine: Engine, kind: str, pattern: str) -> Iterator[tuple[str, Tensor]]:
    """Collective: whole copies of one kind of tensor, of parameters whose names fit `pattern`; see `Engine.view`."""
    sharding, window = engine._sharding, engine._window
    names = [name for name in sharding.names if fnmatch.fnmatchcase(name, pattern)]
    if kind == "grad":
        engine._refuse_stages('view("grad")')
        total = sharding.settle([window.weight or 0.0]).extra[0] if window.backwards else 0.0
        scale = engine._unscale(total)
        for name, tensor in sharding.full(kind, names):
            yield name, tensor.float().mul(scale) if tensor.dtype != torch.float64 else tensor * scale
        return
    if kind not in ("param", "master"):
        _require_field(engine, kind)

    def items_of(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        return sharding.full(kind, names) if kind in ("param", "master") else field_of(engine, kind, names)

    for name, tensor in across_stages(engine, items_of, names):
        yield name, tensor.detach().clone()


def field_of(engine: Engine, kind: str, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Collective: one field of the optimizer's state, whole."""
    return engine._sharding.full_of(lambda unit: _own_part(engine, unit, kind), names)


def _require_field(engine: Engine, kind: str) -> None:
    """Collective. Raises ProtocolError, on all ranks alike, for a field that the optimizer does not keep."""
    known = set().union(*engine._sharding.exchange(_fields_here(engine), "fields of the optimizer's state"))
    if kind not in known:  # a rank without a slice cannot tell by itself
        raise ProtocolError(f"unknown kind '{kind}'; there are 'param', 'grad' and {sorted(known)}")


def _fields_here(engine: Engine) -> list[str]:
    part = next(iter(engine._sharding.slices()), None)
    if part is None or engine._update is None:
        return []
    with engine._update.state(part) as state:
        return sorted(state)


def _own_part(engine: Engine, unit: Unit, kind: str) -> Tensor | None:
    if not unit.trainable:
        return None
    own = torch.zeros(unit.own[1] - unit.own[0], dtype=unit.master_dtype, device=unit.flat.device)
    for part, start, stop in engine._sharding.slices_of(unit):
        assert engine._update is not None
        with engine._update.state(part) as state:
            if kind not in state:
                raise ProtocolError(f"unknown kind '{kind}'; there are 'param', 'grad' and {sorted(state)}")
            own[start:stop].copy_(state[kind])
    return own


def state_dict_on(engine: Engine, rank: int, *, frozen: bool) -> dict[str, Tensor] | None:
    """Collective: as `ordinary_state_dict`, on the CPU of one rank; the others hold one tensor at a time."""
    sharding, module = engine._sharding, engine.module
    trained = {name for group in engine._groups for name in group.names}
    names = [name for name in sharding.names if frozen or name in trained]
    mine = engine.rank == rank
    items = across_stages(engine, lambda names: sharding.full("param", names), names)
    whole = {name: tensor.detach().to("cpu", copy=True) for name, tensor in items if mine}
    first = {id(param): name for name, param in module.named_parameters()}
    every = {name: first[id(param)] for name, param in module.named_parameters(remove_duplicate=False)}
    tied = {name: whole[stored] for name, stored in merged(engine, every).items() if stored in whole}
    buffers = dict(persistent_buffers(module))
    found = across_stages(engine, lambda names: [(name, buffers[name]) for name in names], list(buffers))
    kept = {name: buffer.detach().to("cpu", copy=True) for name, buffer in found if mine}
    if not mine:
        return None
    return {**kept, **whole, **tied}


@torch.no_grad()
def rewrite(engine: Engine, kind: str, name: str, value: Tensor) -> None:
    """Collective: one whole tensor of `view` gets new values, the same on every rank.

    kind: "master" (what forward reads follows), "grad" (between the last backward and `step`: the mean gradient,
    unscaled) or a field of the optimizer's state. value: of the parameter's shape. Raises ProtocolError for a kind or
    a name that is not there, and for another shape.
    """
    engine._refuse_stages("writing whole tensors")
    shape = whole_shapes(engine).get(name)
    if shape is None or tuple(value.shape) != shape:
        raise ProtocolError(f"'{name}' has shape {shape}, and the new {kind} has {tuple(value.shape)}.")
    flat = value.reshape(-1)
    _write(engine, kind, name, [(one, flat[one[1].start : one[1].start + one[1].numel]) for one in _runs(engine, name)])


@torch.no_grad()
def rewrite_own(engine: Engine, kind: str, name: str, values: Tensor) -> None:
    """As `rewrite`, but of what this rank holds: flat, as long as `own_part` gives it. Collective below stage 3."""
    engine._refuse_stages("writing parts of tensors")
    runs = _runs(engine, name)
    sizes = [run.numel for _, run in runs]
    if values.numel() != sum(sizes):
        raise ProtocolError(f"this rank holds {sum(sizes)} elements of '{name}', and {values.numel()} were given.")
    _write(engine, kind, name, list(zip(runs, values.reshape(-1).split(sizes))))


@torch.no_grad()
def own_part(engine: Engine, kind: str, name: str) -> tuple[Tensor, int]:
    """(flat copy of "master", "grad" or a field of the optimizer's state on this rank, where it starts in the whole).

    Nothing is communicated, except that a gradient has to be agreed on first, which is collective.
    """
    scale = _agreed_scale(engine) if kind == "grad" else 1.0
    runs = _runs(engine, name)
    found = [_field(engine, part, kind, run.offset, run.numel) * scale for part, run in runs]
    return (torch.cat(found), runs[0][1].start) if found else (torch.empty(0, device=engine.device), 0)


def _runs(engine: Engine, name: str) -> list[tuple[Slice, Run]]:
    """The parts of a parameter on this rank, in order. Raises ProtocolError for one that nothing trains."""
    if engine._update is None or name not in engine._sharding.trainable_names:
        raise ProtocolError(f"'{name}' is frozen, or no parameter of this engine: no state of it is here.")
    found = [
        (part, run)
        for part in engine._sharding.slices()
        for shard in part.shards
        for run in in_whole(engine, shard.name, shard.shape, shard.start, shard.numel, shard.offset)
        if run.name == name
    ]
    return sorted(found, key=lambda one: one[1].start)


def _write(engine: Engine, kind: str, name: str, parts: Sequence[tuple[tuple[Slice, Run], Tensor]]) -> None:
    engine.drain()
    scale = _agreed_scale(engine) if kind == "grad" else 1.0
    for (part, run), values in parts:
        here = slice(run.offset, run.offset + run.numel)
        if kind == "grad":
            if part.brings:
                raise ProtocolError(f"the gradient of '{name}' rests off the device, where it cannot be written.")
            part.grad[here] = (values / scale).to(part.grad.device)
            continue
        assert engine._update is not None
        with engine._update.state(part, write=True) as state:
            _require_kind(kind, state)
            state[kind][here] = values.to(state[kind].device)
            if kind == "master" and part.low is not None:
                part.low[here] = values.to(part.low.device)
    if kind == "master":
        engine._sharding.publish()


def _agreed_scale(engine: Engine) -> float:
    """Collective: what the stored gradient is multiplied by to be the mean gradient."""
    if not engine._window.backwards:
        raise ProtocolError("no gradient is here: ask between the last engine.backward() and engine.step()")
    return engine._unscale(engine._sharding.settle([engine._window.weight or 0.0]).extra[0])


def _field(engine: Engine, part: Slice, kind: str, offset: int, numel: int) -> Tensor:
    if kind == "grad":
        return part.grad[offset : offset + numel].float()
    assert engine._update is not None
    with engine._update.state(part) as state:
        _require_kind(kind, state)
        return state[kind][offset : offset + numel].clone()


def _require_kind(kind: str, state: Mapping[str, Tensor]) -> None:
    if kind not in state:
        raise ProtocolError(f"unknown kind '{kind}'; there are 'grad' and {sorted(state)}")


def ordinary_state_dict(engine: Engine) -> dict[str, Tensor]:
    """Collective: what `module.state_dict()` of an ordinary model would hold; tied names share one tensor."""
    sharding, module = engine._sharding, engine.module
    items = across_stages(engine, lambda names: sharding.full("param", names), sharding.names)
    whole = {name: tensor.detach().clone() for name, tensor in items}
    first = {id(param): name for name, param in module.named_parameters()}
    second = {name: first[id(param)] for name, param in module.named_parameters(remove_duplicate=False)}
    for name, stored in merged(engine, second).items():
        if stored in whole:  # not a tile, which is part of another name's tensor
            whole.setdefault(name, whole[stored])
    kept = {name: buffer.detach().clone() for name, buffer in persistent_buffers(module) if name not in whole}
    if engine._pipelined is not None:
        kept = dict(across_stages(engine, lambda names: [(name, kept[name]) for name in names], list(kept)))
    return {**whole, **kept}
