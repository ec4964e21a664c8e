"""`deepspeed.comm`: torch.distributed, with what differs in it. Before any process group exists there is one rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trilithon.comm import mesh

DEFAULT_TIMEOUT = timedelta(minutes=float(os.environ.get("DEEPSPEED_TIMEOUT", "10")))


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True, distributed_port: int = 29500,
    verbose: bool = True, timeout: timedelta | None = None, init_method: str | None = None,
    dist_init_required: bool | None = None, config: Any = None, rank: int = -1, world_size: int = -1,
) -> None:  # fmt: skip
    """Join the process group that the launcher's environment describes; without one, a group of this process alone.

    dist_backend: "nccl" becomes gloo for CPU tensors and NCCL for those of a GPU. Raises ConfigError for an environment
    that is half set.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    seconds = (timeout or DEFAULT_TIMEOUT).total_seconds()
    backend = "cpu:gloo,cuda:nccl" if dist_backend == "nccl" and torch.cuda.is_available() else dist_backend
    if rank >= 0 and world_size > 0:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    started = bool(os.environ.get("RANK") or os.environ.get("WORLD_SIZE"))
    if started:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    if started and init_method is not None:
        dist.init_process_group(backend or "gloo", init_method, timeout, int(os.environ["WORLD_SIZE"]), rank)
    else:
        mesh.init_distributed(backend, seconds, alone=True)


def _once_begun(function: Callable[..., Any], before: Any) -> Callable[..., Any]:
    """A function of torch.distributed, and what one rank by itself gets before there is a process group."""
    return lambda *args, **kwargs: function(*args, **kwargs) if dist.is_initialized() else before


get_rank, get_world_size = _once_begun(dist.get_rank, 0), _once_begun(dist.get_world_size, 1)
get_all_ranks_from_group = _once_begun(lambda group=None: dist.get_process_group_ranks(group), [0])
barrier = _once_begun(dist.barrier, None)


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK") or 0)


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any, group_rank: int) -> int:
    return dist.get_global_rank(group, group_rank) if group is not None else group_rank


class _Together(list[dist.Work]):
    """Several transfers under way, as one."""

    def wait(self) -> None:
        for work in self:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self)


def all_gather_coalesced(outputs: Any, inputs: Any, group: Any = None, async_op: bool = False) -> Any:
    """outputs[i]: [world_size * n_i], of inputs[i]: [n_i]."""
    works = [dist.all_gather_into_tensor(out, one, group=group, async_op=True) for out, one in zip(outputs, inputs)]
    together = _Together(works)
    return together if async_op else together.wait()


def has_all_gather_into_tensor() -> bool:
    return True


has_reduce_scatter_tensor = has_coalescing_manager = has_all_reduce_coalesced = has_all_gather_into_tensor


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", mesh_shape, mesh_dim_names=mesh_dim_names)


def configure(*_args: Any, **_kwargs: Any) -> None:
    """Bytes of the engine's collectives are always counted: `engine.native.ledger`."""
