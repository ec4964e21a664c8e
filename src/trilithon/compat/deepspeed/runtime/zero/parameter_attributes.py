"""The attributes that DeepSpeed sets on parameters of stage 3, as properties of `nn.Parameter`.

They exist on parameters built under `zero.Init` and on those of an engine at stage 3; on any other parameter asking for
one raises AttributeError, so that `hasattr` tells them apart. A cut parameter keeps its true `shape` and `numel()`, and
a rank's part of it (`ds_tensor`) may be more or less than `partition_numel()` elements: an engine cuts flat units.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from trilithon import zero
from trilithon.compat.deepspeed.comm import get_world_size

ZeroParamStatus = Enum("ZeroParamStatus", ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"])  # whether the values are here


@dataclass(eq=False)
class _Record:
    """What DeepSpeed keeps on a parameter. kept: its values from before `all_gather`, as long as it is whole."""

    number: int
    active: set[int] = field(default_factory=set)
    whole: ExitStack | None = None
    kept: Tensor | None = None


_RECORDS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_NUMBERS = itertools.count()


def note(param: nn.Parameter) -> None:
    """From now on the parameter has the attributes."""
    if not hasattr(nn.Parameter, "ds_id"):
        for name in _ATTRIBUTES:  # properties: a parameter of stage 3 changes between whole and cut under its user
            setattr(nn.Parameter, name, property(partial(_read, name)))
    if param not in _RECORDS:
        _RECORDS[param] = _Record(next(_NUMBERS))


def forget(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        _RECORDS.pop(param, None)


def is_zero_param(parameter: Any) -> bool:
    return isinstance(parameter, Tensor) and parameter in _RECORDS


def _read(name: str, param: nn.Parameter) -> Any:
    record = _RECORDS.get(param)
    if record is None:
        raise AttributeError(f"'{type(param).__name__}' object has no attribute '{name}' (it is not cut by stage 3)")
    return _ATTRIBUTES[name](param, record)


def _own(param: nn.Parameter, _: _Record) -> Tensor:
    own = zero.own_slice(param)
    return param.data.view(-1) if own is None else own.values


def _all_gather(param: nn.Parameter, param_list: Sequence[nn.Parameter] | None = None, **_ignored: Any) -> None:
    """Collective: whole until `partition`."""
    for one in param_list or [param]:
        record = _RECORDS[one]
        if record.whole is None and zero.is_cut(one):
            record.whole = ExitStack()
            record.whole.enter_context(zero.gathered(one, modify=0))
            record.kept = one.detach().clone()


def _partition(
    param: nn.Parameter, param_list: Sequence[nn.Parameter] | None = None, has_been_updated: bool = False, **_: Any
) -> None:
    """Collective: cut again. has_been_updated: keep what rank 0 wrote since `all_gather`; else it is lost."""
    for one in param_list or [param]:
        record = _RECORDS[one]
        if record.whole is None:
            continue
        if not has_been_updated and record.kept is not None:
            one.data.copy_(record.kept)
        whole, record.whole, record.kept = record.whole, None, None
        whole.close()


def _summary(param: Any, record: _Record, slice_shape: bool = False, use_debug_name: bool = False) -> dict[str, Any]:
    summary = {"id": record.number, "status": param.ds_status.name, "active_sub_modules": record.active}
    summary |= dict.fromkeys(("numel", "ds_numel"), param.numel())
    summary |= dict.fromkeys(("shape", "ds_shape"), tuple(param.shape))
    summary |= {"requires_grad": param.requires_grad, "persist": param.ds_persist}
    return summary | ({"ds_tensor.shape": tuple(_own(param, record).shape)} if slice_shape else {})


_ATTRIBUTES: dict[str, Callable[[nn.Parameter, _Record], Any]] = {
    "ds_id": lambda _, record: record.number,
    "ds_shape": lambda param, _: torch.Size(param.shape),
    "ds_numel": lambda param, _: param.numel(),
    "ds_status": lambda param, _: ZeroParamStatus.NOT_AVAILABLE if zero.is_cut(param) else ZeroParamStatus.AVAILABLE,
    "ds_tensor": _own,
    "ds_persist": lambda param, record: not zero.is_cut(param) and record.whole is None,  # whole, and nobody asked
    "ds_process_group": lambda *_: dist.group.WORLD if dist.is_initialized() else None,
    "ds_active_sub_modules": lambda _, record: record.active,
    "ds_summary": lambda param, record: partial(_summary, param, record),
    "all_gather": lambda param, _: partial(_all_gather, param),
    "partition": lambda param, _: partial(_partition, param),
    "partition_numel": lambda param, _: lambda: -(-param.numel() // get_world_size()),
}
