"""`deepspeed.accelerator.get_accelerator()`: the device of this process, a GPU where there is one, else the CPU.

Nothing is asked of a device before a method that needs one is called. DS_ACCELERATOR=cpu chooses the CPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from trilithon.compat.deepspeed.comm import get_local_rank
from trilithon.compat.deepspeed.names import ROOT
from trilithon.errors import ConfigError
from trilithon.tiers.host import available_host_bytes

_BUILDERS = f"{ROOT}.ops.op_builder"


def _calls(function: Callable[..., Any], passed: int = 0) -> Callable[..., Any]:
    """A method that calls a function with the first of its arguments, and drops the others."""
    return lambda _self, *args, **kwargs: function(*[*args, *kwargs.values()][:passed])


def _always(value: Any) -> Callable[..., Any]:
    return _calls(lambda: value)


class DeepSpeedAccelerator:
    """What both kinds of device have. Types of tensors are torch's; the rest is torch.cuda's or torch.cpu's."""

    _name: ClassVar[str]
    is_available = is_bf16_supported = is_fp16_supported = _always(True)
    range_push = range_pop = set_compile_backend = _always(None)  # ranges are torch.profiler's; engine.compile chooses
    amp, random, get_compile_backend = _always(torch.amp), _always(torch.random), _always("inductor")
    supported_dtypes = _calls(lambda: [torch.float, torch.half, torch.bfloat16])
    visible_devices_envs = _calls(lambda: ["CUDA_VISIBLE_DEVICES"])
    is_pinned = _calls(Tensor.is_pinned, 1)
    op_builder_dir = _always(_BUILDERS)
    get_op_builder = _calls(lambda name: getattr(import_module(_BUILDERS), name), 1)
    create_op_builder = _calls(lambda name: getattr(import_module(_BUILDERS), name)(), 1)
    total_memory: Callable[..., int]
    available_memory: Callable[..., int]

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))

    def __getattr__(self, name: str) -> Any:
        home = torch if name.endswith("Tensor") else getattr(torch, self._name)
        return getattr(home, name)


class CPU_Accelerator(DeepSpeedAccelerator):
    """One device, the host, whose work is done when a call returns: streams do nothing, memory is the host's."""

    _name = "cpu"
    Event = Stream = None
    communication_backend_name, export_envs, memory_stats = _always("gloo"), _calls(list), _calls(dict)
    device_name = current_device_name = _always("cpu")
    is_synchronized_device = use_host_timers = resolves_data_dependency = handles_memory_backpressure = _always(True)
    is_triton_supported = _always(False)
    device = stream = _always(contextlib.nullcontext())
    set_device = synchronize = current_stream = default_stream = empty_cache = reset_peak_memory_stats = _always(None)
    current_device = _calls(get_local_rank)
    device_count = _calls(lambda: int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1))
    manual_seed = manual_seed_all = _calls(torch.manual_seed, 1)
    initial_seed, default_generator = _calls(torch.initial_seed), _always(torch.default_generator)
    get_rng_state, set_rng_state = _calls(torch.get_rng_state), _calls(torch.set_rng_state, 1)
    pin_memory = _calls(lambda tensor: tensor, 1)
    available_memory = _calls(lambda: available_host_bytes() or 0)
    total_memory = _calls(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_allocated(self, device_index: Any = None) -> int:
        """Not counted by torch for the host: what is in use on it."""
        return int(self.total_memory() - self.available_memory())

    max_memory_allocated = memory_cached = max_memory_cached = memory_reserved = max_memory_reserved = memory_allocated


class CUDA_Accelerator(DeepSpeedAccelerator):
    """Streams, memory and random states are torch.cuda's, under the same names."""

    _name = "cuda"
    communication_backend_name, export_envs = _always("nccl"), _calls(lambda: ["NCCL"])
    is_synchronized_device = use_host_timers = resolves_data_dependency = handles_memory_backpressure = _always(False)
    is_triton_supported, pin_memory = _always(True), _calls(Tensor.pin_memory, 1)
    memory_cached = staticmethod(torch.cuda.memory_reserved)
    max_memory_cached = staticmethod(torch.cuda.max_memory_reserved)
    current_device_name = _calls(lambda: f"cuda:{torch.cuda.current_device()}")
    default_generator = _calls(lambda index: torch.cuda.default_generators[index], 1)
    available_memory = _calls(lambda index=None: torch.cuda.mem_get_info(index)[0], 1)
    total_memory = _calls(lambda index=None: int(torch.cuda.get_device_properties(index).total_memory), 1)

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"


_FOUND: list[DeepSpeedAccelerator] = []


def get_accelerator() -> DeepSpeedAccelerator:
    """The same object every time. Raises ConfigError for a DS_ACCELERATOR that is neither "cuda" nor "cpu"."""
    if not _FOUND:
        asked = os.environ.get("DS_ACCELERATOR", "")
        if asked not in ("", "cuda", "cpu"):
            raise ConfigError(f"DS_ACCELERATOR={asked!r}: there are 'cuda' and 'cpu'. Unset it to take what is there.")
        on_gpu = asked == "cuda" or (not asked and torch.cuda.is_available())
        _FOUND.append(CUDA_Accelerator() if on_gpu else CPU_Accelerator())
    return _FOUND[0]


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    _FOUND[:] = [accel_obj]
