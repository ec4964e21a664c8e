"""The five schedules by name, as objects that a program steps: `optim.LearningRate` over any torch optimizer.

None of them is a torch scheduler. Each writes its first rate when it is made; `step()` then moves it on by one.
"""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, ClassVar

from trilithon.config import Config, Section
from trilithon.config import OneCycle as OneCycleSection
from trilithon.config.deepspeed_types import SCHEDULERS
from trilithon.optim import LearningRate
from trilithon.optim.groups import OptimizerSettings

logger = logging.getLogger(__name__)


class _Schedule:
    """optimizer: a torch optimizer, or a wrapper with `optimizer`. The rest: the keys of the section, in its order.

    Raises ValueError for what the section refuses, such as a list of rates that is not one for each group.
    """

    section: ClassVar[type[Section]]

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
        self.optimizer, self.last_batch_iteration = optimizer, last_batch_iteration
        self._rates = LearningRate(optimizer, settings)
        self._rates.move_to(last_batch_iteration + 1)
        self._last_lr = None if self.section is OneCycleSection else self.get_lr()  # told after its first step only

    def get_lr(self) -> list[float]:
        return self._rates.get_lr()

    def get_last_lr(self) -> list[float]:
        """The rates that were written last. Raises AssertionError before any were."""
        assert self._last_lr is not None, "need to call step() first"
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        following = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.load_state_dict({"last_batch_iteration": following})

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        self.last_batch_iteration = int(sd["last_batch_iteration"])
        self._rates.move_to(self.last_batch_iteration + 1)
        self._last_lr = self.get_lr()


VALID_LR_SCHEDULES = list(SCHEDULERS)
CLASSES: dict[str, type[_Schedule]] = {
    name: type(name, (_Schedule,), {"section": section}) for name, section in SCHEDULERS.items()
}
SCHEDULES = {schedule.section.model_fields["kind"].default: schedule for schedule in CLASSES.values()}


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
    fields = {key: field for section in SCHEDULERS.values() for key, field in section.model_fields.items()}
    for key, field in fields.items():
        if key != "kind":
            kind = type(field.default) if isinstance(field.default, int | float | str) else float
            group.add_argument(f"--{key}", type=kind, default=None)
    return parser


globals().update(CLASSES)
