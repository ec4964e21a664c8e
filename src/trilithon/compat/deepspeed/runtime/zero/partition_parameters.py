"""`zero.Init` and `zero.GatheredParameters` on `trilithon.zero.init` and `trilithon.zero.gathered`.

Parameters are built in the type that the program asks for, and the engine rounds them: masters begin with all their
digits. Values may be read and written inside `Init`, and are those of an ordinary construction. A write under
`GatheredParameters` without `modifier_rank` raises on all ranks instead of being lost.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from trilithon import zero
from trilithon.compat.deepspeed.runtime.zero.parameter_attributes import note
from trilithon.errors import ConfigError

ZeroParamType = Enum("ZeroParamType", ["NORMAL", "PARTITIONED", "REMOTE"])  # ordinary, cut, or held elsewhere
_orig_torch_arange = torch.arange  # transformers tells constructors apart by it
_CONSTRUCTORS = ("empty", "zeros", "ones", "full", "eye", "linspace", "logspace", "arange", "tensor", "rand", "randn")
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype, target_device: torch.device | None = None
) -> Callable[..., Tensor]:
    """A constructor whose floating results have this type. `Init` wraps `torch.<constructor>` with what this name is
    bound to when it is entered, which transformers relies on."""

    @functools.wraps(fn)
    def construct(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if made.is_floating_point() else made

    return construct


class _Construction(ExitStack):
    """A context in which new tensors have a type."""

    def _make(self, dtype: torch.dtype) -> None:
        self.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)


class OnDevice(_Construction):
    """Floating tensors made inside have `dtype`, all of them are on `device` ("meta": shapes without values)."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        super().__init__()
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled

    def __enter__(self) -> Self:
        if self._enabled:
            self._make(self._dtype)
            self.enter_context(self._device)
        return self


class Init(_Construction):
    """Parameters registered inside are cut over all ranks; `Init(module=m)` cuts those of a module that is there.

    dtype: floating tensors made inside have it; None leaves them as they are asked for. remote_device: None makes
    parameters on this rank's GPU if there is one; "cpu" where the program says; "nvme" there too, with the slices in
    files under `offload_param.nvme_path` until initialize() takes them over. config_dict_or_path is read for that path
    alone. Raises ConfigError for a group smaller than the world, and for arguments that have no counterpart.
    """

    def __init__(
        self, module: nn.Module | None = None, data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True, remote_device: str | None = None, pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | Path | None = None,
        config: Mapping[str, Any] | str | Path | None = None, enabled: bool = True, dtype: torch.dtype | None = None,
        mpu: Any = None, *, sequence_data_parallel_group: dist.ProcessGroup | None = None, tensor_overrides: Any = None,
        **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, value in others.items():
            if name not in ("zero_param_parallel_group", "param_swapper", *_QUANTIZED):
                raise TypeError(f"zero.Init() got an unexpected keyword argument {name!r}")
            if enabled and value:
                raise ConfigError(f"zero.Init({name}=...) has no counterpart: all ranks hold slices, exact ones.")
        groups = [data_parallel_group, sequence_data_parallel_group]
        groups += [mpu.get_data_parallel_group()] if mpu is not None else []
        if enabled and any(group is not None and group.size() != dist.get_world_size() for group in groups):
            way = "build the model without it and give the mesh in the configuration (mesh.tensor, mesh.pipe)"
            raise ConfigError(f"zero.Init over a part of the ranks: {way}; initialize() cuts the parameters then.")
        self._enabled, self._dtype = enabled, dtype
        self._path = _slices_folder(config if config is not None else config_dict_or_path, remote_device)
        self._device = device_of_new_parameters(remote_device)
        if module is not None and enabled:
            with self:
                for part in module.modules():
                    for name, param in list(part._parameters.items()):
                        part.register_parameter(name, param)

    def __enter__(self) -> Self:
        if self._enabled:
            if self._device is not None:
                self.enter_context(self._device)
            self.enter_context(zero.init(path=self._path))
            self.callback(register_module_parameter_registration_hook(_registered).remove)
            if self._dtype is not None:
                for name in _CONSTRUCTORS:
                    plain = getattr(torch, name)
                    setattr(torch, name, zero_wrapper_for_fp_tensor_constructor(plain, self._dtype, target_device=None))
                    self.callback(setattr, torch, name, plain)
                self._make(self._dtype)
        return self


def _registered(module: nn.Module, _name: str, param: nn.Parameter | None) -> None:
    if param is not None:
        note(param)
        zero.allow_unaware(module)


def device_of_new_parameters(remote_device: str | None) -> torch.device | None:
    """This rank's GPU, where NCCL cuts what is made; None for wherever the program says: without GPUs, and when the
    parameters are to rest elsewhere."""
    if remote_device in ("cpu", "nvme") or not torch.cuda.is_available():
        return None
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK") or torch.cuda.current_device()))


def _slices_folder(config: Mapping[str, Any] | str | Path | None, remote_device: str | None) -> Path | None:
    if config is not None and not isinstance(config, Mapping):
        config = json.loads(Path(config).read_text()) if Path(config).is_file() else {}
    offload = ((config or {}).get("zero_optimization") or {}).get("offload_param") or {}
    path, place = offload.get("nvme_path"), remote_device or offload.get("device")
    if remote_device == "nvme" and not path:
        raise ConfigError('zero.Init(remote_device="nvme") needs offload_param.nvme_path in its config.')
    return Path(path) / "zero_init" if place == "nvme" and path else None


_WRITTEN: set[int] = set()  # ids of the parameters that a context with a modifier_rank holds now


class GatheredParameters(ExitStack):
    """`params` (one, several, or none; also tensors that nobody cuts) are whole inside.

    modifier_rank: that rank's values are everybody's afterwards, the fp32 masters' too; None to read only. A context
    inside one that writes the same parameters adds nothing and communicates nothing. fwd_module is not needed: a
    parameter used in the forward of any module is gathered there.
    """

    def __init__(
        self, params: Tensor | Iterable[Tensor], modifier_rank: int | None = None, fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        found = [params] if isinstance(params, Tensor) or not isinstance(params, Iterable) else list(params)
        self._params = {id(param): param for param in found if isinstance(param, nn.Parameter)} if enabled else {}
        self._rank = modifier_rank
        if fwd_module is not None:
            for param in self._params.values():
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> Self:
        concerned = zero.is_cut if self._rank is None else zero.is_held
        wanted = [p for key, p in self._params.items() if key not in _WRITTEN and concerned(p)]
        self.enter_context(zero.gathered(wanted, modify=self._rank))
        if self._rank is not None:
            for param in wanted:
                _WRITTEN.add(id(param))
                self.callback(_WRITTEN.discard, id(param))
        return self


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that `module` uses a parameter of another one: it is gathered there anyway, and this only lists it."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"register_external_parameter takes a torch.nn.Parameter, got {type(parameter).__name__}.")
    external_parameters(module)[str(id(parameter))] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    if external_parameters(module).pop(str(id(parameter)), None) is None:
        raise RuntimeError("this is not a parameter that was registered as external to the module.")


def external_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """What was registered, by a key of its own."""
    found: dict[str, nn.Parameter] = vars(module).setdefault("_external_params", {})
    return found


class ZeRORuntimeException(RuntimeError):  # noqa: N818 (DeepSpeed's name)
    """A call or setting that does not go together with ZeRO."""
