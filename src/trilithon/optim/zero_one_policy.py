"""When 0/1 Adam refreshes the variance and when it communicates: counters that decide alike on every rank.

Phase A, up to `var_freeze_step`: full-precision rounds, with intervals that double after every `var_update_scaler` of
them; all other steps send one bit per element. Phase B: the variance rests; ranks communicate at intervals that double
after every `local_step_scaler` steps, up to `local_step_clipper`, and move on their own in between.
(Lu et al. 2023, arXiv:2202.06009, section 6: policies for T_v and T_u. Intervals count from the last round, so that a
round that was forced does not shift the pattern out of step.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """As in the configuration of the rule."""

    var_freeze_step: int
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16
    full_precision_warmup: int = 0


@dataclass(slots=True)
class Policy:
    """The counters; all of them are part of a checkpoint."""

    settings: PolicySettings
    var_interval: int = 1
    var_counter: int = 0
    since_full: int = 0
    local_interval: int = 1
    local_counter: int = 0
    since_sync: int = 0
    full_rounds: int = 0
    onebit_rounds: int = 0
    skipped_rounds: int = 0

    def frozen(self, step: int) -> bool:
        """Step number `step` belongs to phase B."""
        return step > self.settings.var_freeze_step

    def full(self, step: int) -> bool:
        """Step number `step` averages gradients in full precision and refreshes the variance."""
        if self.frozen(step):
            return False
        return step <= self.settings.full_precision_warmup or self.since_full + 1 >= self.var_interval

    def did_full(self) -> None:
        self.full_rounds += 1
        self.since_full = 0
        self.var_counter += 1
        if self.var_counter == self.settings.var_update_scaler:
            self.var_counter, self.var_interval = 0, 2 * self.var_interval

    def did_onebit(self) -> None:
        """One compressed round of phase A."""
        self.onebit_rounds += 1
        self.since_full += 1

    def did_local(self) -> bool:
        """One step of phase B; True when ranks communicate now."""
        self.since_sync += 1
        due = self.since_sync >= self.local_interval
        self.skipped_rounds += not due
        self.local_counter += 1
        if self.local_counter == self.settings.local_step_scaler:
            self.local_counter = 0
            self.local_interval = min(self.settings.local_step_clipper, 2 * self.local_interval)
        return due

    def did_sync(self) -> None:
        self.onebit_rounds += 1
        self.since_sync = 0

    def state_dict(self) -> dict[str, int]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "settings"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for item in fields(self):
            if item.name in state:
                setattr(self, item.name, int(state[item.name]))
