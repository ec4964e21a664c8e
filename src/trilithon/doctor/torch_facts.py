"""Facts that torch knows: backends, devices, and the path each kernel takes. Imports torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import torch
import torch.distributed as dist

from trilithon import kernels

_SUFFIXES = ("triton", "numba", "torch")  # fastest first


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

    An implementation of `name` is a function `name_torch`, `name_numba` or `name_triton` beside it. One in numba is
    taken where numba is installed; one in triton only for tensors on an accelerator.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in kernels.__all__:
        home = sys.modules[getattr(kernels, name).__module__]
        there = [suffix for suffix in _SUFFIXES if hasattr(home, f"{name}_{suffix}")]
        usable = [suffix for suffix in there if suffix == "torch" or importlib.util.find_spec(suffix) is not None]
        on_cpu = next((suffix for suffix in usable if suffix != "triton"), None)
        found[name] = {"implementations": there, "cpu": on_cpu}
    return found
