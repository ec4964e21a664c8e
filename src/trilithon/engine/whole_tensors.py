"""Whole tensors out of a cut engine, one at a time: for tools, tests and small models."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trilithon.contracts import Slice
from trilithon.engine.coordinates import in_whole, whole_shapes
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
        total = sharding.settle([window.weight or 0.0]).extra[0] if window.backwards else 0.0
        scale = engine._unscale(total)
        for name, tensor in sharding.full(kind, names):
            yield name, tensor.float().mul(scale) if tensor.dtype != torch.float64 else tensor * scale
        return
    items = sharding.full(kind, names) if kind in ("param", "master") else field_of(engine, kind, names)
    for name, tensor in items:
        yield name, tensor.detach().clone()


def field_of(engine: Engine, kind: str, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Collective: one field of the optimizer's state, whole. Raises ProtocolError for a field that it does not keep."""
    return engine._sharding.full_of(lambda unit: _own_part(engine, unit, kind), names)


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


@torch.no_grad()
def rewrite(engine: Engine, kind: str, name: str, value: Tensor) -> None:
    """Collective: one whole tensor of `view` gets new values, the same on every rank.

    kind: "master" (what forward reads follows), "grad" (between the last backward and `step`: the mean gradient,
    unscaled) or a field of the optimizer's state. value: of the parameter's shape. Raises ProtocolError for a kind or
    a name that is not there, and for another shape.
    """
    engine.drain()
    shape = whole_shapes(engine).get(name)
    if shape is None or tuple(value.shape) != shape:
        raise ProtocolError(f"'{name}' has shape {shape}, and the new {kind} has {tuple(value.shape)}.")
    if name not in engine._sharding.trainable_names:
        raise ProtocolError(f"'{name}' is frozen: there is no {kind} of it to write.")
    scale = _agreed_scale(engine) if kind == "grad" else 1.0
    for part in _slices(engine):
        _rewrite_slice(engine, part, kind, name, value.reshape(-1), scale)
    if kind == "master":
        engine._sharding.publish()


def _slices(engine: Engine) -> list[Slice]:
    return list(engine._sharding.slices()) if engine._update is not None else []


def _rewrite_slice(  # noqa: PLR0917 (one tensor and where it goes)
    engine: Engine, part: Slice, kind: str, name: str, flat: Tensor, scale: float
) -> None:
    shards = part.shards
    runs = [r for s in shards for r in in_whole(engine, s.name, s.shape, s.start, s.numel, s.offset) if r.name == name]
    if not runs:
        return
    if kind == "grad":
        if part.brings:
            raise ProtocolError(f"the gradient of '{name}' rests off the device, where it cannot be written.")
        for run in runs:
            part.grad[run.offset : run.offset + run.numel] = flat[run.start : run.start + run.numel] / scale
        return
    assert engine._update is not None
    with engine._update.state(part, write=True) as state:
        if kind not in state:
            raise ProtocolError(f"unknown kind '{kind}'; there are 'grad' and {sorted(state)}")
        for run in runs:
            values = flat[run.start : run.start + run.numel]
            state[kind][run.offset : run.offset + run.numel] = values
            if kind == "master" and part.low is not None:
                part.low[run.offset : run.offset + run.numel] = values


def _agreed_scale(engine: Engine) -> float:
    """Collective: what the stored gradient is multiplied by to be the mean gradient."""
    if not engine._window.backwards:
        raise ProtocolError("no gradient is here: ask between the last engine.backward() and engine.step()")
    return engine._unscale(engine._sharding.settle([engine._window.weight or 0.0]).extra[0])


def own_part(engine: Engine, kind: str, name: str) -> tuple[Tensor, int]:
    """(flat values of "master", "grad" or a field of the optimizer's state that are on this rank, where they start).

    Nothing is communicated, except that a gradient has to be agreed on first, which is collective. A copy.
    """
    found: list[tuple[int, Tensor]] = []
    scale = _agreed_scale(engine) if kind == "grad" else 1.0
    for part in _slices(engine):
        for shard in part.shards:
            for run in in_whole(engine, shard.name, shard.shape, shard.start, shard.numel, shard.offset):
                if run.name == name:
                    found.append((run.start, _field(engine, part, kind, run.offset, run.numel) * scale))
    found.sort(key=lambda one: one[0])
    return (torch.cat([values for _, values in found]), found[0][0]) if found else (torch.empty(0), 0)


def _field(engine: Engine, part: Slice, kind: str, offset: int, numel: int) -> Tensor:
    if kind == "grad":
        return part.grad[offset : offset + numel].float()
    assert engine._update is not None
    with engine._update.state(part) as state:
        if kind not in state:
            raise ProtocolError(f"unknown kind '{kind}'; there are 'grad' and {sorted(state)}")
        return state[kind][offset : offset + numel].clone()


def ordinary_state_dict(engine: Engine) -> dict[str, Tensor]:
    """Collective: what `module.state_dict()` of an ordinary model would hold; tied names share one tensor."""
    sharding, module = engine._sharding, engine.module
    whole = {name: tensor.detach().clone() for name, tensor in sharding.full("param", sharding.names)}
    first = {id(param): name for name, param in module.named_parameters()}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first[id(param)] in whole:  # not a tile, which is part of another name's tensor
            whole.setdefault(name, whole[first[id(param)]])
    kept = {name: buffer.detach().clone() for name, buffer in persistent_buffers(module) if name not in whole}
    return {**whole, **kept}
