"""When the warm-up of a compressed rule ends: after a given number of updates, or when the variance has settled.

The criterion of Tang et al. 2021 ("1-bit Adam", arXiv:2102.02888, section 7.1) compares |v|_1 with its value
1 / (1 - beta2) steps before and stops at a ratio of 0.96. Taken as it stands it fires at once, because v still grows
and the ratio exceeds one. Here both norms are corrected for their bias, the ratio is smaller over larger, and it has to
hold at three checks in a row, once the rate has stopped rising and two such periods have passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

_CHECKS_PER_PERIOD = 10


class Freeze:
    """freeze_step: the last step of the warm-up, or "auto". All ranks observe the same numbers, so all decide alike."""

    def __init__(self, freeze_step: int | Literal["auto"], *, threshold: float = 0.96, patience: int = 3) -> None:
        self.automatic = freeze_step == "auto"
        self.last: int | None = None if freeze_step == "auto" else int(freeze_step)
        self._threshold, self._patience = threshold, patience
        self._norms: list[tuple[int, float]] = []  # (step, corrected norm), at most one period
        self._held = 0
        self._rate = 0.0

    def over(self, step: int) -> bool:
        """Step number `step` comes after the warm-up."""
        return self.last is not None and step > self.last

    def observe(self, step: int, beta2: float, rate: float, variance: Callable[[], float]) -> None:
        """After update `step` of the warm-up. variance: |v|_1 over all ranks, asked for only when it is looked at."""
        rising, self._rate = rate > self._rate, rate
        if not self.automatic or self.last is not None:
            return
        period = max(round(1.0 / (1.0 - beta2)), 1)
        if rising:
            self._norms, self._held = [], 0
        if step % max(period // _CHECKS_PER_PERIOD, 1):
            return
        now = variance() / (1.0 - beta2**step)
        before = [norm for at, norm in self._norms if at <= step - period]
        self._norms = [(at, norm) for at, norm in self._norms if at > step - period] + [(step, now)]
        if not before or step < 2 * period:
            return
        low, high = sorted((before[-1], now))
        self._held = self._held + 1 if high > 0 and low / high >= self._threshold else 0
        if self._held >= self._patience:
            self.last = step

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "norms": list(self._norms), "held": self._held, "rate": self._rate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A warm-up of given length follows the present settings, not those of the run that was saved."""
        if self.automatic:
            self.last = state.get("last")
            self._norms = [(int(at), float(norm)) for at, norm in state.get("norms", ())]
            self._held = int(state.get("held", 0))
        self._rate = float(state.get("rate", 0.0))
