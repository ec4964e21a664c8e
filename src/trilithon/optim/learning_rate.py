"""Who moves the learning rate, and when.

The rate for an update is in place before that update runs, the first one included; it moves after an update was applied
and stays after a skipped step. So what `get_lr` says before a step is what that step uses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trilithon import schedules
from trilithon.errors import CheckpointError, ConfigError, ProtocolError
from trilithon.optim import deepspeed_schedules as deepspeed
from trilithon.optim.elementwise import Settings
from trilithon.optim.groups import Group, OptimizerSettings

logger = logging.getLogger(__name__)

GroupSchedule = Callable[[int], Mapping[str, Any]]  # step -> settings of one parameter group


@dataclass(frozen=True)
class Factor:
    """A schedule that multiplies each group's own rate, the one it had when the engine was built."""

    schedule: schedules.Schedule


class WithGroups(Protocol):
    """A torch optimizer, or what wraps one. Its groups are looked up at every use: loading a state makes new ones."""

    @property
    def param_groups(self) -> Sequence[Settings]: ...


AnySchedule = OptimizerSettings | LRScheduler | Factor | schedules.Schedule | None


class LearningRate:
    """Sets the rates of `groups`: at once for the first update, then at each `advance`.

    groups: or the torch optimizer that has them, for a program that makes its own steps. schedule: a section of the
    configuration; a torch scheduler over the same optimizer, which is stepped after each applied update; a function
    from step (from 0) to the rate; a `Factor`; or None, which leaves the rates to whoever edits the groups. Raises
    ConfigError for a scheduler that belongs to another optimizer or needs a metric.
    """

    def __init__(self, groups: Sequence[Settings] | WithGroups, schedule: AnySchedule = None) -> None:
        self._groups = groups
        self._updates = 0
        self._scheduler: LRScheduler | None = None
        self._plans: list[GroupSchedule] = []
        if isinstance(schedule, LRScheduler):
            self._scheduler = _checked(schedule, self.groups)
        elif schedule is not None:
            self._plans = _plans(self.groups, schedule)
        self._set()

    @property
    def groups(self) -> Sequence[Settings]:
        return self._groups if isinstance(self._groups, Sequence) else self._groups.param_groups

    @property
    def updates(self) -> int:
        """Updates applied so far: the step whose rates are in the groups now."""
        return self._updates

    @property
    def scheduler(self) -> LRScheduler | None:
        """The torch scheduler in use, if the user gave one."""
        return self._scheduler

    @property
    def given(self) -> bool:
        """A schedule moves the rates; else whoever edits the groups does."""
        return self._scheduler is not None or bool(self._plans)

    def get_lr(self) -> list[float]:
        """The rate that the next update of each group uses."""
        return [float(group["lr"]) for group in self.groups]

    def advance(self) -> None:
        """To be called after every applied update, and not after a skipped step."""
        self._updates += 1
        for group in self.groups:
            if isinstance(group, Group) and group.optimizer is not None:
                group.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers that the user keeps
        if self._scheduler is not None:
            self._scheduler.step()
        self._set()

    def move_to(self, updates: int) -> None:
        """The rates for the update after this many, forwards or backwards. Raises ProtocolError with a torch scheduler,
        which knows the next step only."""
        if self._scheduler is not None:
            raise ProtocolError(
                f"a {type(self._scheduler).__name__} cannot be moved to update {updates}. Load its state, or use a "
                "schedule of the configuration."
            )
        self._updates = updates
        self._set()

    def _set(self) -> None:
        for group, plan in zip(self.groups, self._plans):
            for key, value in plan(self._updates).items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value

    def state_dict(self) -> dict[str, Any]:
        inner = self._scheduler.state_dict() if self._scheduler is not None else None
        return {"updates": self._updates, "scheduler": inner, "lr": self.get_lr()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up the schedule where it was; rates that no schedule sets are restored as well."""
        if (state["scheduler"] is None) != (self._scheduler is None):
            had = "a torch scheduler" if state["scheduler"] is not None else "no torch scheduler"
            raise CheckpointError(
                f"The checkpoint was written with {had}, which is not what this run has. Build the engine with the "
                "same lr_schedule, or load without scheduler state."
            )
        if len(state["lr"]) != len(self.groups):
            raise CheckpointError(
                f"The checkpoint holds rates of {len(state['lr'])} parameter groups and this run has "
                f"{len(self.groups)}. Use the same groups, or load without scheduler state."
            )
        self._updates = int(state["updates"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        for group, lr in zip(self.groups, state["lr"]):
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._set()


def _checked(scheduler: LRScheduler, groups: Sequence[Settings]) -> LRScheduler:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric at each step, which the engine does not have. Do not pass it as "
            "lr_schedule; call its step(metric) yourself: the engine reads the groups it edits."
        )
    mine = {id(group.settings if isinstance(group, Group) else group) for group in groups}
    if not all(id(group) in mine for group in scheduler.optimizer.param_groups):
        raise ConfigError(
            f"The {type(scheduler).__name__} passed as lr_schedule drives another optimizer than the one that trains. "
            "Build it over the optimizer that is passed to initialize."
        )
    # Torch's own mark for "the optimizer has stepped". Our formulas never call the optimizer's step, and without the
    # mark each scheduler would warn that it was stepped too early.
    scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
    return scheduler


def _plans(groups: Sequence[Settings], schedule: Any) -> list[GroupSchedule]:
    if isinstance(schedule, OptimizerSettings):
        return [configured(schedule, group, index, len(groups)) for index, group in enumerate(groups)]
    if isinstance(schedule, Factor):
        bases = [float(group["lr"]) for group in groups]
        return [_rate(schedules.scaled(schedule.schedule, base)) for base in bases]
    if callable(schedule):
        return [_rate(schedule) for _ in groups]
    raise ConfigError(
        f"lr_schedule is a {type(schedule).__name__}; pass a schedule of the configuration, a torch LRScheduler, or a "
        "function from step to learning rate."
    )


def _rate(schedule: schedules.Schedule) -> GroupSchedule:
    return lambda step: {"lr": float(schedule(step))}


def configured(config: OptimizerSettings, group: Settings, index: int, groups: int) -> GroupSchedule:
    """The settings of group `index` of `groups` over steps, from a section of the configuration."""
    c = config.model_dump()
    kind = str(c.pop("kind"))
    own = float(group["lr"])
    if kind in _FACTORS:
        return _rate(schedules.scaled(_FACTORS[kind](c), own))
    if kind == "one_cycle":
        return _one_cycle(c, group, index, groups)
    if kind == "lr_range_test":
        low = deepspeed.rate_of(c["lr_range_test_min_lr"], index, groups, "lr_range_test_min_lr")
        return deepspeed.lr_range_test(
            low, c["lr_range_test_step_size"], c["lr_range_test_step_rate"], c["lr_range_test_staircase"]
        )
    if kind == "warmup_cosine_lr":
        return deepspeed.warmup_cosine_lr(
            own,
            num_steps=c["warmup_num_steps"],
            total_num_steps=c["total_num_steps"],
            warmup_min_ratio=c["warmup_min_ratio"],
            cos_min_ratio=c["cos_min_ratio"],
            kind=c["warmup_type"],
            swing=c["after_total"] == "swing",
        )
    if kind not in ("warmup_lr", "warmup_decay_lr"):
        raise ConfigError(f"lr_schedule.kind={kind!r} is not a learning-rate schedule")
    low = deepspeed.rate_of(c["warmup_min_lr"], index, groups, "warmup_min_lr")
    top = c["warmup_max_lr"]
    high = own if top is None else deepspeed.rate_of(top, index, groups, "warmup_max_lr")
    if kind == "warmup_lr":
        return deepspeed.warmup_lr(low, high, c["warmup_num_steps"], c["warmup_type"])
    return deepspeed.warmup_decay_lr(low, high, c["warmup_num_steps"], c["total_num_steps"], c["warmup_type"])


def _one_cycle(c: dict[str, Any], group: Settings, index: int, groups: int) -> GroupSchedule:
    momentum = (c["cycle_min_mom"], c["cycle_max_mom"]) if c["cycle_momentum"] else None
    if momentum is not None and "betas" not in group:
        logger.warning("lr_schedule.cycle_momentum has no effect: the optimizer of group %d has no betas", index)
        momentum = None
    return deepspeed.one_cycle(
        deepspeed.rate_of(c["cycle_min_lr"], index, groups, "cycle_min_lr"),
        deepspeed.rate_of(c["cycle_max_lr"], index, groups, "cycle_max_lr"),
        rise_steps=c["cycle_first_step_size"],
        fall_steps=c["cycle_second_step_size"],
        rise_stairs=c["cycle_first_stair_count"],
        fall_stairs=c["cycle_second_stair_count"],
        decay_step_size=c["decay_step_size"],
        decay_lr_rate=c["decay_lr_rate"],
        momentum=momentum,
        decay_mom_rate=c["decay_mom_rate"],
    )


def _warmed(warmup_steps: int, rest: schedules.Schedule) -> schedules.Schedule:
    if warmup_steps == 0:
        return rest
    return schedules.join([(warmup_steps, schedules.linear(0.0, 1.0, warmup_steps))], rest)


def _decay(c: dict[str, Any], make: Callable[[float, int], schedules.Schedule]) -> schedules.Schedule:
    steps = c["total_steps"] - c["warmup_steps"]
    rest = make(c["min_ratio"], steps) if steps else schedules.constant(c["min_ratio"])
    return _warmed(c["warmup_steps"], rest)


_FACTORS: dict[str, Callable[[dict[str, Any]], schedules.Schedule]] = {
    "constant": lambda c: _warmed(c["warmup_steps"], schedules.constant(1.0)),
    "linear": lambda c: _decay(c, lambda end, steps: schedules.linear(1.0, end, steps)),
    "cosine": lambda c: _decay(c, lambda end, steps: schedules.cosine(1.0, end, steps)),
    "polynomial": lambda c: _decay(c, lambda end, steps: schedules.polynomial(1.0, end, steps, c["power"])),
    "exponential": lambda c: _warmed(c["warmup_steps"], schedules.exponential(1.0, c["gamma"], c["min_ratio"])),
    "piecewise": lambda c: schedules.piecewise(c["boundaries"], c["factors"]),
}
