"""`deepspeed.utils.groups`: the process groups of the newest engine, as torch's own."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from trilithon.comm.collectives import Group
from trilithon.compat.deepspeed.engines import newest
from trilithon.errors import ProtocolError


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _of(name: str) -> Any:
    """torch's group over an axis of the mesh; the world without an engine."""
    engine = newest()
    if engine is None:
        return _world()
    groups = {"data": engine.mesh.comm.reduce, "tensor": engine.mesh.tensor, "sequence": engine.mesh.sequence}
    group = groups[name]
    return group.process_group if isinstance(group, Group) else None


def _size(axes: str | tuple[str, ...]) -> int:
    engine = newest()
    if engine is None:
        return dist.get_world_size() if dist.is_initialized() and "data" in axes else 1
    return engine.mesh.part(axes)[1]


def _rank(axes: str | tuple[str, ...]) -> int:
    engine = newest()
    if engine is None:
        return dist.get_rank() if dist.is_initialized() and "data" in axes else 0
    return engine.mesh.part(axes)[0]


def _get_data_parallel_group() -> Any:
    """Ranks that hold the same slice of the model: data x sequence."""
    return _of("data")


def _get_data_parallel_world_size() -> int:
    return _size("data")


def _get_data_parallel_rank() -> int:
    return _rank("data")


def _get_sequence_parallel_group() -> Any:
    """None where sequences are not cut."""
    return _of("sequence") if newest() is not None else None


def _get_sequence_parallel_world_size() -> int:
    return _size("sequence")


def _get_sequence_parallel_rank() -> int:
    return _rank("sequence")


def _get_sequence_data_parallel_group() -> Any:
    return _of("data")


def _get_sequence_data_parallel_world_size() -> int:
    return _size(("data", "sequence"))


def _get_sequence_data_parallel_rank() -> int:
    return _rank(("data", "sequence"))


def _get_model_parallel_group() -> Any:
    return _of("tensor") if newest() is not None else None


def _get_model_parallel_world_size() -> int:
    return _size("tensor")


def _get_model_parallel_rank() -> int:
    return _rank("tensor")


get_tensor_model_parallel_group = _get_model_parallel_group
get_tensor_model_parallel_world_size = get_model_parallel_world_size = _get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank = _get_model_parallel_rank
get_data_parallel_group, get_data_parallel_world_size = _get_data_parallel_group, _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank


def _get_expert_parallel_groups(group_name: str, place: int) -> Group:
    engine = newest()
    degree = int(group_name.rpartition("_")[2])
    groups = engine.expert_groups if engine is not None else {}
    if degree not in groups:
        raise ProtocolError(f"there is no expert group '{group_name}': ep_size of the model's layers gives the groups.")
    found = groups[degree][place]
    assert isinstance(found, Group), "engines make groups of ranks"
    return found


def _get_expert_parallel_group(group_name: str) -> Any:
    """group_name: "ep_size_<n>". The ranks over which one set of experts is spread."""
    return _get_expert_parallel_groups(group_name, 0).process_group


def _get_expert_parallel_world_size(group_name: str) -> int:
    return _get_expert_parallel_groups(group_name, 0).world_size


def _get_expert_parallel_rank(group_name: str) -> int:
    return _get_expert_parallel_groups(group_name, 0).rank


def _get_expert_data_parallel_group(group_name: str) -> Any:
    """The ranks that hold the same experts."""
    return _get_expert_parallel_groups(group_name, 2).process_group


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    return _get_expert_parallel_groups(group_name, 2).world_size


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return _get_expert_parallel_groups(group_name, 2).rank
