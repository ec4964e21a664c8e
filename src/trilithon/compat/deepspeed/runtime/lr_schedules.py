"""The five schedules by name, as objects that a program steps. The formulas are those of `optim.learning_rate`.

None of them is a torch scheduler. Each writes its first rate when it is made; `step()` then moves it on by one.
"""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from trilithon.config import Config
from trilithon.config.base import Section
from trilithon.config.schedule import LrRangeTest, WarmupCosineLr, WarmupDecayLr, WarmupLr
from trilithon.config.schedule import OneCycle as OneCycleSection
from trilithon.optim.groups import OptimizerSettings
from trilithon.optim.learning_rate import configured

logger = logging.getLogger(__name__)

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


class _Schedule:
    """optimizer: a torch optimizer, or a wrapper with `optimizer`. The rest: the keys of the section, in its order.

    Raises ValueError for what the section refuses, such as a list of rates that is not one for each group.
    """

    section: ClassVar[type[Section]]
    told_at_once: ClassVar[bool] = True  # get_last_lr works before the first step

    def __init__(self, optimizer: Any, *args: Any, last_batch_iteration: int = -1, **params: Any) -> None:
        keys = [key for key in self.section.model_fields if key != "kind"]
        if len(args) > len(keys):
            *shorter, last_batch_iteration = args
            args = tuple(shorter)
        self._begin(optimizer, _read(type(self).__name__, {**dict(zip(keys, args)), **params}), last_batch_iteration)

    @classmethod
    def of(cls, optimizer: Any, settings: OptimizerSettings) -> _Schedule:
        """From a section of the configuration."""
        made = cls.__new__(cls)
        made._begin(optimizer, settings, -1)
        return made

    def _begin(self, optimizer: Any, settings: OptimizerSettings, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None
        groups = optimizer.param_groups
        self._plans = [configured(settings, group, index, len(groups)) for index, group in enumerate(groups)]
        if last_batch_iteration == -1:
            self._write()
            if not self.told_at_once:
                self._last_lr = None

    def get_lr(self) -> list[float]:
        return [float(plan(self.last_batch_iteration + 1)["lr"]) for plan in self._plans]

    def get_last_lr(self) -> list[float]:
        """The rates that were written last. Raises AssertionError before any were."""
        assert self._last_lr is not None, "need to call step() first"
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        self.last_batch_iteration += 1
        if last_batch_iteration is not None:
            self.last_batch_iteration = last_batch_iteration
        self._write()

    def _write(self) -> None:
        for group, plan in zip(self.optimizer.param_groups, self._plans):
            for key, value in plan(self.last_batch_iteration + 1).items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        self.last_batch_iteration = int(sd["last_batch_iteration"])
        self._last_lr = self.get_lr()


class WarmupLR(_Schedule):
    """From warmup_min_lr to warmup_max_lr, where it stays."""

    section = WarmupLr


class WarmupDecayLR(_Schedule):
    """As WarmupLR, then along a line back to warmup_min_lr."""

    section = WarmupDecayLr


class WarmupCosineLR(_Schedule):
    """The group's rate times a ratio that rises, then falls along a cosine."""

    section = WarmupCosineLr


class OneCycle(_Schedule):
    """One rise and fall of the rate, then decay; momentum the other way."""

    section = OneCycleSection
    told_at_once = False


class LRRangeTest(_Schedule):
    """A rate that rises without end."""

    section = LrRangeTest


SCHEDULES: dict[str, type[_Schedule]] = {
    "lr_range_test": LRRangeTest,
    "one_cycle": OneCycle,
    "warmup_lr": WarmupLR,
    "warmup_decay_lr": WarmupDecayLR,
    "warmup_cosine_lr": WarmupCosineLR,
}


def _read(name: str, params: Mapping[str, Any]) -> OptimizerSettings:
    """The section that a `scheduler` block with these parameters becomes, by the rules of the release in force."""
    found = dict(params)
    if found.get("warmup_type", "log") not in ("log", "linear"):
        logger.warning("warmup_type=%r is unknown; the warm-up is logarithmic", found["warmup_type"])
        found["warmup_type"] = "log"
    block = {"train_micro_batch_size_per_gpu": 1, "scheduler": {"type": name, "params": found}}
    section = Config.load(block, name=name).lr_schedule
    assert section is not None
    return section


def add_tuning_arguments(parser: ArgumentParser) -> ArgumentParser:
    """`--lr_schedule` and a flag for each parameter of each schedule."""
    group = parser.add_argument_group("learning-rate schedule")
    group.add_argument("--lr_schedule", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    seen: set[str] = set()
    for schedule in SCHEDULES.values():
        for key, field in schedule.section.model_fields.items():
            if key != "kind" and key not in seen:
                seen.add(key)
                kind = type(field.default) if isinstance(field.default, int | float | str) else float
                group.add_argument(f"--{key}", type=kind, default=None, help=f"of {schedule.__name__}")
    return parser
