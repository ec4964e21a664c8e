"""What a program can ask a `DeepSpeedEngine` about its configuration: methods without arguments, made of tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from trilithon.compat.deepspeed.runtime.config import DeepSpeedConfig
from trilithon.engine.engine import Engine
from trilithon.errors import BatchError

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_GATHER = ("gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save")


def _block(engine: Any, name: str) -> Mapping[str, Any]:
    """A section of the configuration as it was written; empty where there is none."""
    section = engine.config.get(name)
    return section if isinstance(section, Mapping) else {}


def _told(path: str) -> Callable[[Any], Any]:
    read = attrgetter(path)
    return lambda engine: read(engine)  # noqa: PLW0108 (classes bind functions, and not attrgetters)


def _flag(key: str) -> Callable[[Any], Any]:
    return lambda engine: bool(engine.config.get(key, False))


# Method -> what lies at a path below the engine.
_PATHS = {
    "train_micro_batch_size_per_gpu": "_micro_size",
    "gradient_accumulation_steps": "_accumulation",
    "zero_optimization": "_config.zero_enabled",
    "was_step_applied": "_applied",  # by the last `step()`
    "get_data_parallel_rank": "native.mesh.data_rank",
}
# Methods that return what the configuration has under the same name, and flags of its block.
_CONFIG = (
    *("managed_gradient_accumulation", "optimizer_params", "scheduler_name", "scheduler_params", "gradient_clipping"),
    *("fp16_enabled", "bfloat16_enabled", "zero_optimization_stage", "steps_per_print"),
)
_FLAGS = ("zero_allow_untested_optimizer", "wall_clock_breakdown", "dataloader_drop_last")
_ANSWERS: dict[str, Callable[[Any], Any]] = {
    **{name: _told(path) for name, path in _PATHS.items()},
    **{name: _told(f"_config.{name}") for name in _CONFIG},
    **{name: _flag(name) for name in _FLAGS},
    "train_batch_size": lambda engine: engine._micro_size * engine._accumulation * engine.dp_world_size,
    "get_lr": lambda engine: [float(group["lr"]) for group in engine._groups()],
    "get_mom": lambda engine: [group.get("momentum", group.get("betas", 0.0)) for group in engine._groups()],
    "get_type": lambda engine: [group.get("type", 0.0) for group in engine._groups()],
    # as configured: 0 is a dynamic one; the present one is `optimizer.loss_scale`
    "loss_scale": lambda engine: float(getattr(engine._config.native.precision, "loss_scale", 0.0)),
    "dynamic_loss_scale": lambda engine: engine.loss_scale() == 0,
    "zero_optimization_partition_gradients": lambda engine: engine._config.zero_optimization_stage >= 2,
    "zero_optimization_partition_weights": lambda engine: engine._config.zero_optimization_stage >= 3,
    "zero_gather_16bit_weights_on_model_save": lambda engine: any(
        _block(engine, "zero_optimization").get(prefix + name) is True for name in _GATHER for prefix in ("stage3_", "")
    ),
    "load_universal_checkpoint": lambda engine: _block(engine, "checkpoint").get("load_universal") is True,
}


class Settings:
    """Mixed into the engine, whose attributes these are."""

    native: Engine
    _config: DeepSpeedConfig

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def get_batch_info(self) -> tuple[Callable[[], int], ...]:
        """Three methods and not what they return, as in DeepSpeed."""
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """By another number of micro-batches, from the next step on."""
        unit = self._micro_size * self.dp_world_size
        if train_batch_size <= 0 or train_batch_size % unit:
            raise BatchError(
                f"set_train_batch_size({train_batch_size}): not a multiple of micro-batch x data-parallel ranks = "
                f"{self._micro_size} x {self.dp_world_size} = {unit}. Choose one, or change the micro-batch first."
            )
        self._accumulation = self.native.accumulation = train_batch_size // unit

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        self._micro_size = micro_batch_size

    def _groups(self) -> list[dict[str, Any]]:
        return self.basic_optimizer.param_groups if self.basic_optimizer is not None else []

    def optimizer_name(self) -> str | None:
        return type(self.basic_optimizer).__name__ if self.basic_optimizer is not None else self._config.optimizer_name

    @property
    def communication_data_type(self) -> torch.dtype:
        return _DTYPES[self._config.native.zero.comm_dtype or self._config.native.precision.kind]


for _name, _answer in _ANSWERS.items():
    setattr(Settings, _name, _answer)
