"""Whole tensors out of a cut engine, one at a time: for tools, tests and small models."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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


def state_dict_on(engine: Engine, rank: int, *, frozen: bool) -> dict[str, Tensor] | None:
    """Collective: as `ordinary_state_dict`, on the CPU of one rank; the others hold one tensor at a time."""
    sharding, module = engine._sharding, engine.module
    trained = {name for group in engine._groups for name in group.names}
    names = [name for name in sharding.names if frozen or name in trained]
    mine = engine.rank == rank
    whole = {name: tensor.detach().to("cpu", copy=True) for name, tensor in sharding.full("param", names) if mine}
    if not mine:
        return None
    first = {id(param): name for name, param in module.named_parameters()}
    every = [(name, first[id(param)]) for name, param in module.named_parameters(remove_duplicate=False)]
    tied = {name: whole[stored] for name, stored in every if stored in whole}
    kept = {name: buffer.detach().to("cpu", copy=True) for name, buffer in persistent_buffers(module)}
    return {**kept, **whole, **tied}


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
