"""`deepspeed.accelerator.get_accelerator()`: the device of this process, a GPU where there is one, else the CPU.

Nothing is asked of a device before a method that needs one is called. DS_ACCELERATOR=cpu chooses the CPU.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from trilithon.compat.deepspeed.names import ROOT
from trilithon.errors import ConfigError
from trilithon.tiers.host import available_host_bytes


class DeepSpeedAccelerator:
    """What both kinds of device have. Names of tensor types and the like are those of torch."""

    _name: ClassVar[str]
    _backend: ClassVar[str]
    BoolTensor, ByteTensor = torch.BoolTensor, torch.ByteTensor
    IntTensor, LongTensor = torch.IntTensor, torch.LongTensor
    FloatTensor, DoubleTensor = torch.FloatTensor, torch.DoubleTensor
    HalfTensor, BFloat16Tensor = torch.HalfTensor, torch.BFloat16Tensor

    def communication_backend_name(self) -> str:
        return self._backend

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        """Work is done when a call returns."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes."""
        raise NotImplementedError

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def is_triton_supported(self) -> bool:
        return self._name == "cuda"

    def amp(self) -> Any:
        return torch.amp

    def range_push(self, msg: str) -> None:
        """Ranges are those of torch.profiler."""

    def range_pop(self) -> None:
        """Ranges are those of torch.profiler."""

    def op_builder_dir(self) -> str:
        return f"{ROOT}.ops.op_builder"

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

    def get_compile_backend(self) -> str:
        return "inductor"

    def set_compile_backend(self, backend: str) -> None:
        """engine.compile(backend=...) chooses."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class CPU_Accelerator(DeepSpeedAccelerator):
    """One device, the host: streams and events do nothing, memory is the host's."""

    _name, _backend = "cpu", "gloo"
    Event: Any = None
    Stream: Any = None

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    current_device_name = device_name

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def set_device(self, device_index: Any) -> None:
        """There is one."""

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK") or 0)

    def device_count(self) -> int:
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def synchronize(self, device_index: Any = None) -> None:
        """Work is done when a call returns."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def current_stream(self, device_index: Any = None) -> None:
        return None

    default_stream = current_stream

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: Any = None) -> None:
        torch.set_rng_state(new_state)

    def random(self) -> Any:
        return torch.random

    def default_generator(self, device_index: Any = None) -> torch.Generator:
        return torch.default_generator

    def empty_cache(self) -> None:
        """There is none."""

    def available_memory(self, device_index: Any = None) -> int:
        return available_host_bytes() or 0

    def total_memory(self, device_index: Any = None) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_allocated(self, device_index: Any = None) -> int:
        """Not counted by torch for the host: what is in use on it."""
        return self.total_memory() - self.available_memory()

    max_memory_allocated = memory_cached = max_memory_cached = memory_reserved = max_memory_reserved = memory_allocated

    def reset_peak_memory_stats(self, device_index: Any = None) -> None:
        """Nothing is kept."""

    def memory_stats(self, device_index: Any = None) -> dict[str, int]:
        return {}

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()


class CUDA_Accelerator(DeepSpeedAccelerator):
    """What is not here is torch.cuda's, under the same name."""

    _name, _backend = "cuda", "nccl"

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index]

    def random(self) -> Any:
        return torch.random

    def total_memory(self, device_index: int | None = None) -> int:
        return int(torch.cuda.get_device_properties(device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    def memory_cached(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        return tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

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
