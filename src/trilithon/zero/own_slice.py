"""What this rank holds of one parameter that is cut over ranks, for tools that look below whole tensors.

Nothing is communicated. A model under construction (`zero.init`) and one of an engine answer alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from trilithon.zero.init import Builder
from trilithon.zero.sharded_parameter import ShardedParameter, find_owner
from trilithon.zero.sharding import ZeroSharding


@dataclass(frozen=True, slots=True)
class OwnSlice:
    """Elements [start, start + n) of the flattened parameter. values: [n], in the type that forward reads."""

    values: Tensor
    start: int
    world_size: int


def is_cut(param: Tensor) -> bool:
    """Only a slice of the values is on this rank now: reading them gathers or raises."""
    return isinstance(param, ShardedParameter)


def is_held(param: Tensor) -> bool:
    """An engine, or a model under construction, answers for the values, be they whole now or not."""
    return find_owner(param) is not None


def own_slice(param: nn.Parameter) -> OwnSlice | None:
    """This rank's slice; None for a parameter that nobody cuts. Raises TierError when it rests on a disk that fails.

    An engine cuts units and not parameters, so a rank's slice of one parameter may be all of it, or empty.
    """
    owner = find_owner(param)
    if isinstance(owner, Builder):
        values, start, world_size = owner.own_slice(param)
        return OwnSlice(values, start, world_size)
    if not isinstance(owner, ZeroSharding):
        return None
    for unit in owner.units:
        for field, one in zip(unit.layout.fields, unit.params, strict=True):
            if one is not param:
                continue
            low, high = max(unit.own[0], field.start), min(unit.own[1], field.stop)
            if low >= high:
                start = field.numel if unit.own[0] >= field.stop else 0
                return OwnSlice(unit.flat.new_empty(0), start, unit.comm.world_size)
            values = unit.read_values()[low - unit.own[0] : high - unit.own[0]]
            return OwnSlice(values, low - field.start, unit.comm.world_size)
    return None
