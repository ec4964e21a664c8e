"""`deepspeed.utils.groups`: the process groups of the newest engine, as torch's own.

For each of the families below `<family>_group()`, `<family>_world_size()` and `<family>_rank()`. Before there is an
engine all ranks are data-parallel and nothing else. Those of experts take "ep_size_<n>", as layers call their groups:
the ranks over which one set of experts is spread, and (data) those that hold the same experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist

from trilithon.comm.collectives import Group
from trilithon.engine.owners import newest
from trilithon.errors import ProtocolError

_FAMILIES = {
    **dict.fromkeys(("_get_data_parallel", "get_data_parallel"), ("data",)),
    "_get_sequence_parallel": ("sequence",),
    "_get_sequence_data_parallel": ("data", "sequence"),
    **dict.fromkeys(("_get_model_parallel", "get_model_parallel", "get_tensor_model_parallel"), ("tensor",)),
}
_EXPERTS = {"_get_expert_parallel": 0, "_get_expert_data_parallel": 2}  # places in `Engine.expert_groups`


def _of_axes(axes: tuple[str, ...], what: str) -> Any:
    engine = newest()
    if what != "group":
        everywhere = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() and "data" in axes else (0, 1)
        return (everywhere if engine is None else engine.mesh.part(axes))[what == "world_size"]
    if engine is None:
        return dist.group.WORLD if dist.is_initialized() and "data" in axes else None
    # the ranks that hold the same slice of the model are those of data x sequence
    group = engine.mesh.comm.reduce if "data" in axes else getattr(engine.mesh, axes[0])
    return group.process_group if isinstance(group, Group) else None


def _of_experts(place: int, what: str, group_name: str) -> Any:
    engine, degree = newest(), int(group_name.rpartition("_")[2])
    groups = engine.expert_groups if engine is not None else {}
    if degree not in groups:
        raise ProtocolError(f"there is no expert group '{group_name}': ep_size of the model's layers gives the groups.")
    return getattr(groups[degree][place], "process_group" if what == "group" else what)


for _what in ("group", "world_size", "rank"):
    globals().update({f"{family}_{_what}": partial(_of_axes, axes, _what) for family, axes in _FAMILIES.items()})
    globals().update({f"{family}_{_what}": partial(_of_experts, place, _what) for family, place in _EXPERTS.items()})
