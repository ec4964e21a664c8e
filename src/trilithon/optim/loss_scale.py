"""What the loss is multiplied by before backward, and what happens when a gradient is not finite.

Dynamic loss scaling after Micikevicius et al. 2018 (arXiv:1710.03740, section 3.2) with the hysteresis rule of Megatron
and DeepSpeed. The scale that a window's losses were multiplied by is the one its gradients are divided by: it moves
only in `accept`, after the update or the skip. All ranks pass the same flag, so their scales stay equal without talk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from trilithon.errors import CheckpointError, NonFiniteError

NonFinitePolicy = Literal["skip", "raise", "ignore"]


def _unnamed() -> str | None:
    return None


def _where(suspect: Callable[[], str | None]) -> str:
    name = suspect()
    return f"; the first one found here is in parameter {name!r}" if name else ""


class NoScale:
    """Scale 1, for fp32 and bf16. `non_finite` counts the steps whose gradients were not finite, skipped or not.

    suspect: called only for an error message; names the first parameter with a non-finite gradient, if it is known.
    """

    def __init__(self, policy: NonFinitePolicy = "skip", suspect: Callable[[], str | None] = _unnamed) -> None:
        self.policy = policy
        self.non_finite = 0
        self._steps = 0
        self._suspect = suspect

    @property
    def scale(self) -> float:
        return 1.0

    def accept(self, finite: bool) -> bool:
        """True: apply the step. Raises NonFiniteError under the policy "raise"."""
        self._steps += 1
        if finite:
            return True
        self.non_finite += 1
        if self.policy == "raise":
            raise NonFiniteError(
                f"A gradient is NaN or infinite in step {self._steps}{_where(self._suspect)}. Lower the learning rate "
                'or clip gradients; or set precision.non_finite to "skip" to leave such steps out.'
            )
        return self.policy == "ignore"

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "none", "steps": self._steps, "non_finite": self.non_finite}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _expect(state, "none")
        self._steps, self.non_finite = int(state["steps"]), int(state["non_finite"])


class StaticScale:
    """A fixed scale; steps that overflow are skipped and counted.

    Raises NonFiniteError from `accept` after `give_up_after` overflows in a row, as no later step can be better.
    """

    def __init__(self, scale: float, *, give_up_after: int = 50, suspect: Callable[[], str | None] = _unnamed) -> None:
        self.non_finite = 0
        self._scale = float(scale)
        self._give_up_after = give_up_after
        self._in_a_row = 0
        self._suspect = suspect

    @property
    def scale(self) -> float:
        return self._scale

    def accept(self, finite: bool) -> bool:
        """True: apply the step."""
        if finite:
            self._in_a_row = 0
            return True
        self.non_finite += 1
        self._in_a_row += 1
        if self._in_a_row >= self._give_up_after:
            raise NonFiniteError(
                f"Gradients overflowed in {self._in_a_row} steps in a row at the fixed loss scale {self._scale:g}"
                f"{_where(self._suspect)}. Set precision.loss_scale lower, or to 0 so that it adapts."
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "static", "scale": self._scale, "non_finite": self.non_finite, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Counts are taken; the scale stays the configured one."""
        _expect(state, "static")
        self.non_finite, self._in_a_row = int(state["non_finite"]), int(state["in_a_row"])


class DynamicScale:
    """Doubles after more than `window` good steps, halves when overflows have used up the hysteresis.

    With iteration i from 0, last overflow l from -1 and hysteresis left q from H, one step does:
    overflow: halve if q = 1, else q -= 1; l = i.  Good: q = H if `consecutive_hysteresis`; with k = i - l - 1 good
    steps before this one, when k > 0 is a multiple of `window`, q = H and the scale doubles.  Then i += 1.  So the
    first doubling is on good step window + 1, as in DeepSpeed.  The scale stays within [min_scale, max_scale].
    Raises NonFiniteError from `accept` at overflow number `give_up_after` in a row that finds the scale at min_scale
    and the hysteresis used up.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        *,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        give_up_after: int = 50,
        suspect: Callable[[], str | None] = _unnamed,
    ) -> None:
        self.non_finite = 0
        self._scale = float(initial)
        self._window = window
        self._hysteresis = hysteresis
        self._consecutive = consecutive_hysteresis
        self._min, self._max = float(min_scale), float(max_scale)
        self._give_up_after = give_up_after
        self._suspect = suspect
        self._iteration = 0
        self._last_overflow = -1
        self._left = hysteresis
        self._in_a_row_at_min = 0

    @property
    def scale(self) -> float:
        return self._scale

    def accept(self, finite: bool) -> bool:
        """True: apply the step. Moves the scale for the next one."""
        self._good_step() if finite else self._overflow()
        self._iteration += 1
        return finite

    def _overflow(self) -> None:
        self.non_finite += 1
        self._last_overflow = self._iteration
        if self._left == 1 and self._scale <= self._min:
            self._in_a_row_at_min += 1
            if self._in_a_row_at_min >= self._give_up_after:
                raise NonFiniteError(
                    f"Gradients overflowed in {self._in_a_row_at_min} steps in a row with the loss scale already at "
                    f"its minimum, {self._min:g}{_where(self._suspect)}. The model itself produces NaN or infinity: "
                    "lower the learning rate, check the data, or train in bf16."
                )
        if self._left == 1:
            self._scale = max(self._scale / 2, self._min)
        else:
            self._left -= 1

    def _good_step(self) -> None:
        self._in_a_row_at_min = 0
        if self._consecutive:
            self._left = self._hysteresis
        before = self._iteration - self._last_overflow - 1
        if before > 0 and before % self._window == 0:
            self._left = self._hysteresis
            self._scale = min(self._scale * 2, self._max)

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": "dynamic",
            "scale": self._scale,
            "iteration": self._iteration,
            "last_overflow": self._last_overflow,
            "hysteresis_left": self._left,
            "in_a_row_at_min": self._in_a_row_at_min,
            "non_finite": self.non_finite,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _expect(state, "dynamic")
        self._scale = float(state["scale"])
        self._iteration, self._last_overflow = int(state["iteration"]), int(state["last_overflow"])
        self._left, self._in_a_row_at_min = int(state["hysteresis_left"]), int(state["in_a_row_at_min"])
        self.non_finite = int(state["non_finite"])


def _expect(state: Mapping[str, Any], kind: str) -> None:
    if state.get("kind") != kind:
        raise CheckpointError(
            f"The checkpoint holds loss-scale state of kind {state.get('kind')!r}, but precision is configured for "
            f"{kind!r}. Configure the same precision, or load without optimizer state."
        )
