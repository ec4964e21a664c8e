"""Facts that torch knows: backends, devices, and the path each kernel takes. Imports torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from trilithon import kernels


def backends() -> dict[str, bool]:
    """Which process-group backends this torch can use."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False, "mpi": False}
    return {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }


def devices() -> list[dict[str, Any]]:
    """The accelerators torch can use, with their memory in bytes."""
    if not torch.cuda.is_available():
        return []
    rows: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        rows.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "total_bytes": total,
                "free_bytes": free,
            }
        )
    return rows


def cpu() -> dict[str, Any]:
    """What torch uses of the processor."""
    return {"vector_instructions": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}


def kernel_paths() -> dict[str, dict[str, Any]]:
    """For each kernel: the implementations there are, and the one taken here on CPU tensors.

    `name_torch` runs anywhere. Beside it, a loop without the suffix of `name` is compiled by numba where that is
    installed, and a module `..._triton` holds a version for accelerators. TRILITHON_KERNELS=torch turns loops off.
    """
    compiler = importlib.util.find_spec("numba") is not None and os.environ.get("TRILITHON_KERNELS") != "torch"
    found: dict[str, dict[str, Any]] = {}
    for name in kernels.__all__:
        home = sys.modules[getattr(kernels, name).__module__]
        looped = hasattr(home, f"{name.rstrip('_').removesuffix('_step')}_loop")
        on_gpu = importlib.util.find_spec(f"{home.__name__}_triton") is not None
        there = [kind for kind, is_there in (("triton", on_gpu), ("numba", looped), ("torch", True)) if is_there]
        found[name] = {"implementations": there, "cpu": "numba" if looped and compiler else "torch"}
    return found
