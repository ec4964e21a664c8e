"""What a program can ask a `DeepSpeedEngine` about its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from trilithon.compat.deepspeed.runtime.config import DeepSpeedConfig
from trilithon.engine.engine import Engine
from trilithon.errors import BatchError

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def _told(path: str) -> Callable[[Any], Any]:
    """A method that returns what lies at `path` under the engine."""
    read = attrgetter(path)

    def answer(engine: Any) -> Any:
        return read(engine)

    return answer


def _flag(key: str) -> Callable[[Any], bool]:
    """A method that returns the block's `key`; False without it."""
    return lambda engine: bool(engine.config.get(key, False))


class Settings:
    """Mixed into the engine, whose attributes these are."""

    native: Engine
    _config: DeepSpeedConfig
    config: dict[str, Any]
    basic_optimizer: torch.optim.Optimizer | None
    dp_world_size: int
    _accumulation: int
    _micro_size: int

    # ------------------------------------------------------------------------------------------------ batch sizes
    def train_batch_size(self) -> int:
        return self._micro_size * self._accumulation * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro_size

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    managed_gradient_accumulation = _told("_config.managed_gradient_accumulation")

    def get_batch_info(self) -> tuple[Callable[[], int], Callable[[], int], Callable[[], int]]:
        """The three methods, as in DeepSpeed."""
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """By another number of micro-batches, from the next step on."""
        unit = self._micro_size * self.dp_world_size
        if train_batch_size <= 0 or train_batch_size % unit:
            raise BatchError(
                f"Train batch size must be divisible by micro-batch data parallelism: {train_batch_size} is no "
                f"multiple of {self._micro_size} x {self.dp_world_size} = {unit}."
            )
        self._accumulation = self.native.accumulation = train_batch_size // unit

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        self._micro_size = micro_batch_size

    # -------------------------------------------------------------------------------------------------- optimizer
    def _groups(self) -> list[dict[str, Any]]:
        return self.basic_optimizer.param_groups if self.basic_optimizer is not None else []

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups()]

    def get_type(self) -> list[Any]:
        return [group.get("type", [0.0]) if "type" in group else 0.0 for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Momentum, or the betas, of each group."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._groups()]

    def optimizer_name(self) -> str | None:
        return type(self.basic_optimizer).__name__ if self.basic_optimizer is not None else self._config.optimizer_name

    optimizer_params = _told("_config.optimizer_params")
    scheduler_name = _told("_config.scheduler_name")
    scheduler_params = _told("_config.scheduler_params")
    gradient_clipping = _told("_config.gradient_clipping")

    # -------------------------------------------------------------------------------------------------- precision
    fp16_enabled = _told("_config.fp16_enabled")
    bfloat16_enabled = _told("_config.bfloat16_enabled")

    def fp16_auto_cast(self) -> bool:
        return bool(getattr(self._config.native.precision, "cast_inputs", False))

    amp_enabled = use_node_local_storage = lambda _: False

    def loss_scale(self) -> float:
        """As configured: 0 is a dynamic one. The present one is `optimizer.loss_scale`."""
        return float(getattr(self._config.native.precision, "loss_scale", 0.0))

    def dynamic_loss_scale(self) -> bool:
        return self.loss_scale() == 0

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(of parameters, of added gradients)"""
        kind = self._config.native.precision.kind
        return _DTYPES[kind], _DTYPES[self._config.native.zero.accumulate_dtype or kind]

    @property
    def communication_data_type(self) -> torch.dtype:
        native = self._config.native
        return _DTYPES[native.zero.comm_dtype or native.precision.kind]

    # ------------------------------------------------------------------------------------------------------- zero
    zero_optimization = _told("_config.zero_enabled")
    zero_optimization_stage = _told("_config.zero_optimization_stage")
    zero_allow_untested_optimizer = _flag("zero_allow_untested_optimizer")

    def zero_optimization_partition_gradients(self) -> bool:
        return self._config.zero_optimization_stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self._config.zero_optimization_stage >= 3

    def zero_cpu_offload(self) -> bool:
        return self._config.native.offload.state == "host"

    def zero_offload_optimizer(self) -> Any:
        return self._zero().get("offload_optimizer")

    def zero_offload_param(self) -> Any:
        return self._zero().get("offload_param")

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        names = ("gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save")
        return any(self._zero().get(prefix + name) is True for name in names for prefix in ("stage3_", ""))

    def _zero(self) -> Mapping[str, Any]:
        section = self.config.get("zero_optimization")
        return section if isinstance(section, Mapping) else {}

    # ------------------------------------------------------------------------------------------------------ others
    was_step_applied = _told("_applied")  # by the last `step()`
    get_data_parallel_rank = _told("native.mesh.data_rank")
    steps_per_print = _told("_config.steps_per_print")
    wall_clock_breakdown = _flag("wall_clock_breakdown")
    dump_state = _flag("dump_state")
    dataloader_drop_last = _flag("dataloader_drop_last")

    def load_universal_checkpoint(self) -> bool:
        section = self.config.get("checkpoint")
        return isinstance(section, Mapping) and section.get("load_universal") is True
