"""`deepspeed.initialize`: every way of calling it becomes one call of `trilithon.initialize`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trilithon.compat.deepspeed.comm import init_distributed
from trilithon.compat.deepspeed.ops import optimizers as ops
from trilithon.compat.deepspeed.runtime.config import ArgumentError, DeepSpeedConfig
from trilithon.compat.deepspeed.runtime.engine import DeepSpeedEngine
from trilithon.compat.deepspeed.runtime.lr_schedules import SCHEDULES
from trilithon.compat.deepspeed.runtime.pipe.engine import PipelineEngine
from trilithon.compat.deepspeed.runtime.zero.parameter_offload import adopt, release
from trilithon.engine.build import initialize as native_initialize
from trilithon.engine.owners import engine_of
from trilithon.parallel.pipeline import PipelineModule

_CLASSES: dict[str, tuple[type[ops.ByName], type[ops.ByName]]] = {  # by kind: with state on the device, and elsewhere
    **dict.fromkeys(("adam", "adamw"), (ops.FusedAdam, ops.DeepSpeedCPUAdam)),
    "adagrad": (ops.DeepSpeedCPUAdagrad, ops.DeepSpeedCPUAdagrad),
    "lamb": (ops.FusedLamb, ops.FusedLamb),
    "lion": (ops.FusedLion, ops.DeepSpeedCPULion),
    "onebit_adam": (ops.OnebitAdam, ops.OnebitAdam),
    "onebit_lamb": (ops.OnebitLamb, ops.OnebitLamb),
    "zero_one_adam": (ops.ZeroOneAdam, ops.ZeroOneAdam),
}
_TENSOR_PARALLEL = {"size": 0}  # what `tp_model_init` was told, for the next `initialize`


def initialize(
    args: Any = None, model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None, training_data: Any = None, lr_scheduler: Any = None,
    distributed_port: int = 29500, mpu: Any = None, dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None, config: Any = None, mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:  # fmt: skip
    """(engine, optimizer, loader of training_data, scheduler); the last three None where nothing asks for them.

    A model that another engine trains is given back first. Raises AssertionError for missing or doubled arguments, and
    ConfigError (a ValueError) for a configuration that cannot be carried out, before anything is communicated.
    """
    if model is None:
        raise ArgumentError("deepspeed.initialize(model=None): nothing to train; pass a torch module as model.")
    source = _configuration(args, config if config is not None else config_params)
    _choose_device(args)
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    stages = model.num_stages if isinstance(model, PipelineModule) else 1
    settings = DeepSpeedConfig(_with_tensor_parallel(source), mpu, stages=stages)
    if stages > 1 and (zero_stage := settings.zero_optimization_stage) >= 2:
        raise ArgumentError(f"a pipeline of {stages} stages trains at ZeRO stage 0 or 1; got stage {zero_stage}.")
    _refuse(mpu, mesh_param)
    basic = _optimizer(settings, model, optimizer, model_parameters)
    if basic is None and settings.zero_optimization_stage in (1, 2):
        raise ArgumentError(f"zero stage {settings.zero_optimization_stage} requires an optimizer")
    scheduler = _scheduler(settings, basic, lr_scheduler, driven=optimizer is not None)
    if (previous := engine_of(model)[0]) is not None:
        release(previous)
        previous.close(give_back=True)
    objects = {"optimizer": None, "lr_schedule": None}  # which are there already
    native = native_initialize(model, settings.native.model_copy(update=objects), optimizer=basic)
    adopt(native)
    engine = (PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine)(
        native, settings, basic_optimizer=basic, client_optimizer=optimizer, lr_scheduler=scheduler,
        training_data=training_data, collate_fn=collate_fn, mpu=mpu,
    )  # fmt: skip
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _configuration(args: Any, config: Any) -> Any:
    told = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and told is not None:
        raise ArgumentError(
            "the configuration is given twice: by config= and by --deepspeed_config (args.deepspeed_config). Keep one."
        )
    if config is None and told is None:
        raise ArgumentError(
            "no configuration: pass config= (a dict or a path), or --deepspeed_config FILE to the script."
        )
    return config if config is not None else told


def _choose_device(args: Any) -> None:
    """The environment says which device is this rank's; arguments do where it does not."""
    rank = getattr(args, "device_rank", None)
    rank = rank if rank is not None else getattr(args, "local_rank", None)
    if "LOCAL_RANK" not in os.environ and isinstance(rank, int) and rank >= 0:
        os.environ["LOCAL_RANK"] = str(rank)


def _refuse(mpu: Any, mesh_param: Any) -> None:
    for name in ("model", "tensor_model", "pipe", "pipeline_model", "sequence"):
        if (size := getattr(mpu, f"get_{name}_parallel_world_size", lambda: 1)()) > 1:
            raise ArgumentError(
                f"mpu cuts the model or its sequences over ranks by itself ({name}: {size}), which an engine of ours "
                "does through its own mesh: leave mpu out and set tensor_parallel.autotp_size or "
                "sequence_parallel_size (mesh.tensor, mesh.sequence)."
            )
    if mesh_param is not None:
        raise ArgumentError(f"mesh_param={mesh_param}: write the sizes (sequence_parallel_size) in the configuration.")


def _optimizer(
    settings: DeepSpeedConfig, model: nn.Module, given: Any, parameters: Iterable[Any] | None
) -> torch.optim.Optimizer | None:
    """The torch optimizer with the groups: the caller's, or one for the configuration."""
    if isinstance(given, torch.optim.Optimizer):
        given.param_groups[:] = [group for group in given.param_groups if group["params"]]
        return given
    if given is not None and not callable(given):
        raise ArgumentError(f"optimizer is a {type(given).__name__}; pass a torch optimizer, or a function making one.")
    section, of_torch = settings.native.optimizer, settings.torch_optimizer
    if given is None and section is None and of_torch is None:
        return None
    params = _trainable(list(parameters) if parameters is not None else list(model.parameters()))
    if given is not None or of_torch is not None:
        made = (given or of_torch)(params)  # type: ignore[misc]
        assert isinstance(made, torch.optim.Optimizer), f"optimizer made a {type(made).__name__}"
        return made
    assert section is not None
    if section.kind == "sgd":
        return torch.optim.SGD(params, **{k: v for k, v in section.model_dump().items() if k != "kind"})
    return _CLASSES[section.kind][settings.native.offload.state != "device"].of(params, section)


def _trainable(params: list[Any]) -> list[Any]:
    """Without frozen parameters and without groups that are empty then."""
    if params and isinstance(params[0], dict):
        listed = ([held] if isinstance(held := group["params"], torch.Tensor) else list(held) for group in params)
        groups = [{**group, "params": _trainable(held)} for group, held in zip(params, listed)]
        return [group for group in groups if group["params"]]
    params = [param[1] if isinstance(param, tuple) else param for param in params]  # of named_parameters()
    return [param for param in params if param.requires_grad]


def _scheduler(settings: DeepSpeedConfig, basic: torch.optim.Optimizer | None, given: Any, *, driven: bool) -> Any:
    """The caller's scheduler, or the configured one, over the groups of the basic optimizer. driven: one was given."""
    if isinstance(given, LRScheduler) and not driven:
        raise ArgumentError(
            f"a {type(given).__name__} was passed without the optimizer that it drives; pass that as optimizer, or a "
            "function from optimizer to scheduler as lr_scheduler."
        )
    if given is not None:
        return given(basic) if callable(given) and not hasattr(given, "step") else given
    if basic is None:
        return None
    if settings.torch_scheduler is not None:
        return settings.torch_scheduler(basic)
    section = settings.native.lr_schedule
    return SCHEDULES[section.kind].of(basic, section) if section is not None else None


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **_: Any
) -> nn.Module:
    """The model as it is: the next `initialize` cuts its matrices over `tp_size` ranks (mesh.tensor)."""
    _TENSOR_PARALLEL["size"] = tp_size
    return model


def _with_tensor_parallel(source: Any) -> Any:
    size, _TENSOR_PARALLEL["size"] = _TENSOR_PARALLEL["size"], 0
    if size <= 1 or not isinstance(source, dict):
        return source
    return {**source, "tensor_parallel": {**source.get("tensor_parallel", {}), "autotp_size": size}}


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(f"--{name}", action="store_true", help="use the engine")
        group.add_argument(f"--{name}_config", help="configuration file, JSON")
    return parser
