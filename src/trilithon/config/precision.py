"""Number formats of parameters and what happens when a loss or gradient is not finite.

bf16 and fp16 follow mixed-precision training with fp32 master weights (Micikevicius et al. 2018, arXiv:1710.03740).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from trilithon.config.base import Count, Flag, NonNegativeReal, Positive, PositiveReal, Section, named

NonFinite = Literal["skip", "raise", "ignore"]


class Fp32(Section):
    """Parameters, gradients and optimizer state in fp32."""

    kind: Literal["fp32"] = "fp32"
    non_finite: NonFinite = "skip"
    """A gradient that is NaN or infinite: skip that step, raise NonFiniteError, or ignore it (no check is made)."""


class Bf16(Section):
    """Parameters in bf16 for forward and backward, fp32 master weights for the update."""

    kind: Literal["bf16"] = "bf16"
    non_finite: NonFinite = "skip"
    """A gradient that is NaN or infinite: skip that step, raise NonFiniteError, or ignore it (no check is made)."""
    cast_inputs: Flag = True
    """Cast floating-point inputs of the model to bf16 before forward."""


class Fp16(Section):
    """Parameters in fp16 with loss scaling, fp32 master weights for the update.

    The dynamic scale starts at 2**initial_scale_power, is halved when overflows have used up `hysteresis`, and is
    doubled by the step without overflow that follows `window` others.
    """

    kind: Literal["fp16"] = "fp16"
    cast_inputs: Flag = True
    """Cast floating-point inputs of the model to fp16 before forward."""
    loss_scale: NonNegativeReal = 0.0
    """A fixed factor for the loss; 0 chooses it dynamically."""
    initial_scale_power: Annotated[Count, Field(le=127)] = 16
    """The dynamic scale starts at two to this power."""
    window: Positive = 1000
    """Steps without overflow before the one that doubles the dynamic scale."""
    hysteresis: Positive = 2
    """Overflows tolerated before the dynamic scale is halved."""
    consecutive_hysteresis: Flag = False
    """True: each step without overflow restores the full hysteresis. False: only a doubling of the scale does."""
    min_scale: PositiveReal = 1.0
    """The dynamic scale never goes below this."""
    max_scale: PositiveReal = 2.0**24
    """The dynamic scale never goes above this."""
    give_up_after: Positive = 50
    """Consecutive overflows at `min_scale` with no hysteresis left, or at a fixed scale, at which training stops with
    NonFiniteError."""

    @model_validator(mode="after")
    def _scale_range(self) -> Fp16:
        initial = 2.0**self.initial_scale_power
        if self.loss_scale == 0 and not self.min_scale <= initial <= self.max_scale:
            raise ValueError(
                f"the initial scale 2**{self.initial_scale_power} = {initial:g} lies outside "
                f"min_scale={self.min_scale:g} .. max_scale={self.max_scale:g}; change initial_scale_power or the range"
            )
        return self


PrecisionConfig = Annotated[Fp32 | Bf16 | Fp16, Field(discriminator="kind"), BeforeValidator(named)]
