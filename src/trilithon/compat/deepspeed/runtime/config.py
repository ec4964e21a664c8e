"""`DeepSpeedConfig`: the block that a program wrote, and the native configuration that it becomes."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from trilithon.compat.deepspeed.comm import get_world_size
from trilithon.config import Config, sources
from trilithon.config.batch import ResolvedBatch
from trilithon.config.deepspeed_release import Release, deepspeed_release
from trilithon.config.deepspeed_tolerant import tolerant
from trilithon.config.deepspeed_types import OWN_OPTIMIZERS, SCHEDULERS
from trilithon.errors import BatchError, ConfigError

logger = logging.getLogger(__name__)

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, LION_OPTIMIZER = "adam", "adamw", "lamb", "lion"
ADAGRAD_OPTIMIZER, MUON_OPTIMIZER = "adagrad", "muon"
RELEASE_KEY = "_deepspeed_release"


class DeepSpeedConfigError(ConfigError):
    """The configuration does not say something that can be done; lists everything that is wrong."""


class ArgumentError(DeepSpeedConfigError, AssertionError):
    """Arguments that contradict each other or are missing, which DeepSpeed asserts."""


class DeepSpeedConfig:
    """config: a dict, the path of a JSON file, or urlsafe base64 of one.

    native: the Config it becomes, without optimizer and schedule if torch has to make these. raw: the block itself.
    release: whose behaviour applies, by the key "_deepspeed_release" of the block, else the environment.
    stages: of the pipeline that the model is cut into. Raises ValueError for what is none of these, BatchError for
    batch sizes, DeepSpeedConfigError for everything else.
    """

    def __init__(
        self, config: str | os.PathLike[str] | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None,
        *, stages: int = 1,
    ) -> None:  # fmt: skip
        self.raw: dict[str, Any] = dict(config) if isinstance(config, Mapping) else sources.read(config)[0]
        self._param_dict = self.raw
        self.mpu = mpu
        self.release: Release = deepspeed_release(self.raw.get(RELEASE_KEY))
        block, left_out = tolerant(self.raw)
        if left_out:
            logger.debug("keys without effect, as in DeepSpeed: %s", ", ".join(left_out))
        self.managed_gradient_accumulation = block.pop("managed_gradient_accumulation", True) is not False
        self.torch_optimizer = _of_torch(block, "optimizer", torch.optim, OWN_OPTIMIZERS, lower=True)
        self.torch_scheduler = _of_torch(block, "scheduler", torch.optim.lr_scheduler, SCHEDULERS, lower=False)
        try:
            self.native = Config.load(block, deepspeed_release=self.release, name="the DeepSpeed configuration")
            if stages > 1:
                mesh = self.native.mesh.model_copy(update={"pipe": stages})
                self.native = self.native.model_copy(update={"mesh": mesh})
            self.batch: ResolvedBatch = self.native.resolve_batch(self.native.mesh.axes(get_world_size()).size("data"))
        except BatchError:
            raise
        except ConfigError as error:
            raise DeepSpeedConfigError(str(error)) from None
        self.train_batch_size = self.batch.global_size
        self.train_micro_batch_size_per_gpu = self.batch.micro_size
        self.gradient_accumulation_steps = self.batch.accumulation
        self.gradient_clipping = self.native.clip_norm
        self.zero_optimization_stage = self.native.zero.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.fp16_enabled = self.native.precision.kind == "fp16"
        self.bfloat16_enabled = self.native.precision.kind == "bf16"
        self.steps_per_print = self.raw.get("steps_per_print")
        self.optimizer_name, self.optimizer_params = self._named("optimizer")
        self.scheduler_name, self.scheduler_params = self._named("scheduler")

    def _named(self, block: str) -> tuple[str | None, dict[str, Any] | None]:
        """The type that `optimizer` or `scheduler` names, and its parameters; None without one."""
        section = self.raw.get(block)
        if not isinstance(section, Mapping):
            return None, None
        return section.get("type"), dict(section.get("params") or {})

    def print(self, name: str) -> None:
        """Every value in force, and where it comes from."""
        logger.info("%s:\n%s", name, self.native.model_dump_json(indent=2))


def _of_torch(
    block: dict[str, Any], name: str, where: Any, ours: Collection[str], *, lower: bool
) -> Callable[..., Any] | None:
    """A class of torch that the block names, with its parameters; it leaves the block then."""
    section = block.get(name)
    kind = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(kind, str) or (kind.lower() if lower else kind) in ours:
        return None
    found = getattr(where, kind, None)
    if not isinstance(found, type):
        return None
    del block[name]
    assert isinstance(section, Mapping)
    return functools.partial(found, **(section.get("params") or {}))
