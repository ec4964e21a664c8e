"""Who belongs together: named axes over ranks, and the process groups made from them.

`config.mesh.Axes` is pure arithmetic and knows nothing of torch: rank <-> coordinates in row-major order, the last axis
varying fastest, so that neighbouring ranks (usually of one host) share the last axis. `make_mesh` and
`own_process_group` are thin and need a process group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from trilithon.comm import attempt
from trilithon.config.mesh import Axes
from trilithon.errors import ConfigError

__all__ = ["Axes", "axes_of", "init_distributed", "make_mesh", "own_process_group", "rendezvous_store"]

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_distributed(backend: str | None = None, timeout_s: float = 1800.0, *, alone: bool = False) -> bool:
    """Join the process group that the environment describes, as torchrun sets it.

    Returns True when a process group is initialised (now or already, by anyone) and False for a plain single process,
    that is when neither RANK nor WORLD_SIZE is set; with `alone` such a process gets a group of its own, so that a
    program may call collectives in either case. `backend` None means gloo, and NCCL beside it for CUDA tensors
    where CUDA is usable. Raises ConfigError when the environment is half set or its values contradict each other.
    """
    if dist.is_initialized():
        return True
    timeout = timedelta(seconds=timeout_s)
    if not os.environ.get("RANK") and not os.environ.get("WORLD_SIZE"):
        if alone:
            dist.init_process_group(
                backend or "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=timeout
            )
        return alone
    missing = [name for name in _ENVIRONMENT if not os.environ.get(name)]
    if missing:
        present = ", ".join(f"{name}={os.environ[name]}" for name in _ENVIRONMENT if os.environ.get(name))
        raise ConfigError(
            f"the environment is half set for several processes: {present}, but {', '.join(missing)} missing. "
            "Start with `torchrun --nproc-per-node N script.py` or `trilithon launch`, or unset RANK and WORLD_SIZE "
            "to run as one process."
        )
    rank, world_size, _ = (_integer(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} does not fit WORLD_SIZE={world_size}; ranks run from 0 to WORLD_SIZE - 1.")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or rank) % torch.cuda.device_count())
        backend = backend or "cpu:gloo,cuda:nccl"
    if not attempt.outlives_ranks():
        dist.init_process_group(backend or "gloo", timeout=timeout)
        return True
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    own = attempt.fresh_part(store, rank, world_size, timeout_s)
    dist.init_process_group(backend or "gloo", store=own, rank=rank, world_size=world_size, timeout=timeout)
    return True


def rendezvous_store() -> Any:
    """The store through which the ranks met, for `comm.watchdog.Watchdog`; None without a process group."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def make_mesh(axes: dict[str, int] | None = None, device: str = "cpu") -> DeviceMesh | None:
    """A DeviceMesh over all ranks; `axes` None is one axis "data". None for a single process without process group.

    Collective: every rank calls it with the same axes. Raises ConfigError when the axes do not span exactly the world.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    wanted = axes if axes is not None else {"data": world_size}
    named = Axes(tuple(wanted), tuple(wanted.values()))
    if named.world_size != world_size:
        drawn = " x ".join(f"{name}={size}" for name, size in wanted.items())
        raise ConfigError(
            f"the mesh {drawn} has {named.world_size} ranks, but {world_size} are running. "
            f"Start {named.world_size} processes, or change one axis so that the product is {world_size}."
        )
    if not dist.is_initialized():
        return None
    return init_device_mesh(device, named.sizes, mesh_dim_names=named.names)


def own_process_group(
    mesh: DeviceMesh | None, axis: str | Sequence[str] = "data", timeout_s: float | None = None,
    split: Callable[[list[int]], list[list[int]]] | None = None, backend: str | None = None,
) -> dist.ProcessGroup | None:  # fmt: skip
    """A new process group over this rank's peers on one axis, or on several; None without a mesh.

    split: cuts the ranks of an axis, in order, into smaller groups.

    Collectives that may be in flight at the same time each need their own (see `comm.collectives.Group`), whereas
    `mesh.get_group(axis)` always returns the same one. backend: None for that of the default group. Collective: every
    rank of the mesh calls it.
    """
    if mesh is None:
        return None
    names = tuple(mesh.mesh_dim_names or ())
    named = Axes(names, tuple(mesh.shape))
    flat = mesh.mesh.flatten().tolist()
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    mine: dist.ProcessGroup | None = None
    for members in named.groups(axis):
        whole = [flat[member] for member in members]
        for ranks in split(whole) if split is not None else [whole]:
            made = dist.new_group(ranks, timeout=timeout, backend=backend)
            if dist.get_rank() in ranks:
                mine = made
    return mine


def axes_of(mesh: DeviceMesh | None) -> Axes:
    """The arithmetic of a mesh; one data-parallel rank without one."""
    if mesh is None:
        return Axes(("data",), (1,))
    return Axes(tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape))


def _integer(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(f"{name}={os.environ[name]!r} is not a whole number.") from None
