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

from trilithon.compat.deepspeed.names import ROOT
from trilithon.errors import ConfigError
from trilithon.tiers.host import available_host_bytes


def _always(value: Any) -> Callable[..., Any]:
    """A method that returns one value, whatever it is passed."""
    return lambda *_args, **_kwargs: value


class DeepSpeedAccelerator:
    """What both kinds of device have. Names of tensor types and the like are those of torch."""

    _name: ClassVar[str]
    BoolTensor, ByteTensor, IntTensor, LongTensor = (
        torch.BoolTensor,
        torch.ByteTensor,
        torch.IntTensor,
        torch.LongTensor,
    )
    FloatTensor, DoubleTensor, HalfTensor = torch.FloatTensor, torch.DoubleTensor, torch.HalfTensor
    BFloat16Tensor = torch.BFloat16Tensor
    is_available = is_bf16_supported = is_fp16_supported = _always(True)
    range_push = range_pop = set_compile_backend = _always(None)  # ranges are torch.profiler's; engine.compile chooses
    amp, random, get_compile_backend = _always(torch.amp), _always(torch.random), _always("inductor")
    op_builder_dir = _always(f"{ROOT}.ops.op_builder")

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes."""
        raise NotImplementedError

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def get_op_builder(self, class_name: str) -> Any:
        return getattr(import_module(self.op_builder_dir()), class_name)

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def export_envs(self) -> list[str]:
        return ["NCCL"] if self._name == "cuda" else []

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class CPU_Accelerator(DeepSpeedAccelerator):
    """One device, the host, whose work is done when a call returns: streams do nothing, memory is the host's."""

    _name = "cpu"
    Event = Stream = None
    communication_backend_name = _always("gloo")
    device_name = current_device_name = _always("cpu")
    is_synchronized_device = use_host_timers = resolves_data_dependency = handles_memory_backpressure = _always(True)
    is_triton_supported = _always(False)
    device = stream = _always(contextlib.nullcontext())
    set_device = synchronize = current_stream = default_stream = empty_cache = reset_peak_memory_stats = _always(None)
    initial_seed, default_generator = staticmethod(torch.initial_seed), _always(torch.default_generator)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK") or 0)

    def device_count(self) -> int:
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def get_rng_state(self, device_index: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: Any = None) -> None:
        torch.set_rng_state(new_state)

    def available_memory(self, device_index: Any = None) -> int:
        return available_host_bytes() or 0

    def total_memory(self, device_index: Any = None) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_allocated(self, device_index: Any = None) -> int:
        """Not counted by torch for the host: what is in use on it."""
        return self.total_memory() - self.available_memory()

    max_memory_allocated = memory_cached = max_memory_cached = memory_reserved = max_memory_reserved = memory_allocated

    def memory_stats(self, device_index: Any = None) -> dict[str, int]:
        return {}

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        return tensor


class CUDA_Accelerator(DeepSpeedAccelerator):
    """What is not here is torch.cuda's, under the same name."""

    _name = "cuda"
    communication_backend_name, is_triton_supported = _always("nccl"), _always(True)
    is_synchronized_device = use_host_timers = resolves_data_dependency = handles_memory_backpressure = _always(False)
    memory_cached = staticmethod(torch.cuda.memory_reserved)
    max_memory_cached = staticmethod(torch.cuda.max_memory_reserved)

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index]

    def total_memory(self, device_index: int | None = None) -> int:
        return int(torch.cuda.get_device_properties(device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        return tensor.pin_memory()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


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


def is_current_accelerator_supported() -> bool:
    return True
