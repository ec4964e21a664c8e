"""Learning-rate schedules by name.

The plain kinds (constant ... piecewise) give a factor on each parameter group's own learning rate; the others, which
DeepSpeed files use, give learning rates in absolute terms under their own parameter names. A schedule counts the steps
that changed the weights; a skipped step does not move it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from trilithon.config.base import (
    Count,
    Flag,
    Fraction,
    NonNegativeReal,
    Positive,
    PositiveReal,
    Real,
    Section,
    named,
)

# One rate, or one for each parameter group.
PerGroup = NonNegativeReal | Annotated[tuple[NonNegativeReal, ...], Field(min_length=1)]
WarmupType = Literal["log", "linear"]


class Constant(Section):
    """The group's own rate, after an optional linear warm-up."""

    kind: Literal["constant"] = "constant"
    warmup_steps: Count = 0
    """Steps over which the factor rises linearly to 1."""


class _Decaying(Section):
    total_steps: Positive
    """Steps at the end of which the factor has reached min_ratio; it stays there."""
    warmup_steps: Count = 0
    """Steps over which the factor rises linearly to 1, part of total_steps."""
    min_ratio: Fraction = 0.0
    """The factor at the end."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> _Decaying:
        if self.warmup_steps > self.total_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} exceeds total_steps={self.total_steps}; lower it, or raise the total"
            )
        return self


class Linear(_Decaying):
    """Falls along a line from 1 to min_ratio."""

    kind: Literal["linear"] = "linear"


class Cosine(_Decaying):
    """Falls along half a cosine from 1 to min_ratio (Loshchilov and Hutter 2017, arXiv:1608.03983)."""

    kind: Literal["cosine"] = "cosine"


class Polynomial(_Decaying):
    """Falls as the remaining share of steps to the given power; power 0.5 is a square root."""

    kind: Literal["polynomial"] = "polynomial"
    power: PositiveReal = 1.0
    """Exponent of the remaining share of steps."""


class Exponential(Section):
    """Multiplied by `gamma` at every step after warm-up."""

    kind: Literal["exponential"] = "exponential"
    gamma: Annotated[PositiveReal, Field(le=1)]
    """Factor from one step to the next."""
    warmup_steps: Count = 0
    """Steps over which the factor rises linearly to 1."""
    min_ratio: Fraction = 0.0
    """The factor never falls below this."""


class Piecewise(Section):
    """Constant between boundaries."""

    kind: Literal["piecewise"] = "piecewise"
    boundaries: tuple[Positive, ...]
    """Steps, rising, at which the next factor begins."""
    factors: tuple[NonNegativeReal, ...]
    """One factor more than there are boundaries."""

    @model_validator(mode="after")
    def _lengths(self) -> Piecewise:
        if len(self.factors) != len(self.boundaries) + 1:
            raise ValueError(
                f"{len(self.boundaries)} boundaries need {len(self.boundaries) + 1} factors, got {len(self.factors)}"
            )
        if any(b <= a for a, b in zip(self.boundaries, self.boundaries[1:])):
            raise ValueError(f"boundaries={list(self.boundaries)} must rise")
        return self


class OneCycle(Section):
    """One rise and fall of the rate (and the reverse for momentum), then decay (Smith 2018, arXiv:1803.09820)."""

    kind: Literal["one_cycle"] = "one_cycle"
    cycle_min_lr: PerGroup
    """Rate at both ends of the cycle."""
    cycle_max_lr: PerGroup
    """Rate at the top."""
    decay_lr_rate: NonNegativeReal = 0.0
    """After the cycle the rate is cycle_min_lr / (1 + decay_lr_rate * elapsed / decay_step_size)."""
    cycle_first_step_size: Positive = 2000
    """Steps of the rise."""
    cycle_second_step_size: Positive | None = None
    """Steps of the fall. null: as many as the rise."""
    cycle_first_stair_count: Count = 0
    """Stairs into which the rise is quantised; 0: smooth."""
    cycle_second_stair_count: Count | None = None
    """Stairs of the fall. null: as many as the rise."""
    decay_step_size: Count = 0
    """Steps of one unit of decay after the cycle; 0: no decay."""
    cycle_momentum: Flag = True
    """Move the first beta against the rate, where the optimizer has betas."""
    cycle_min_mom: Fraction = 0.8
    """First beta at the top of the cycle."""
    cycle_max_mom: Fraction = 0.9
    """First beta at both ends of the cycle."""
    decay_mom_rate: NonNegativeReal = 0.0
    """After the cycle the first beta is cycle_max_mom * (1 + decay_mom_rate * elapsed / decay_step_size)."""


class WarmupLr(Section):
    """Rises from warmup_min_lr to warmup_max_lr and stays there."""

    kind: Literal["warmup_lr"] = "warmup_lr"
    warmup_min_lr: PerGroup = 0.0
    """Rate at the start."""
    warmup_max_lr: PerGroup | None = None
    """Rate after warm-up. null: the parameter group's own rate."""
    warmup_num_steps: Positive = 1000
    """Steps of the rise; fewer than 2 count as 2."""
    warmup_type: WarmupType = "log"
    """Shape of the rise: with the logarithm of the step, or along a line."""


class WarmupDecayLr(Section):
    """Rises as `warmup_lr`, then falls along a line to warmup_min_lr at total_num_steps."""

    kind: Literal["warmup_decay_lr"] = "warmup_decay_lr"
    total_num_steps: Positive
    """Step at which the rate is back at warmup_min_lr."""
    warmup_min_lr: PerGroup = 0.0
    """Rate at the start and at the end."""
    warmup_max_lr: PerGroup = 0.001
    """Rate after warm-up."""
    warmup_num_steps: Positive = 1000
    """Steps of the rise; fewer than 2 count as 2."""
    warmup_type: WarmupType = "log"
    """Shape of the rise: with the logarithm of the step, or along a line."""


class WarmupCosineLr(Section):
    """The group's own rate times a ratio that rises to 1 and then falls along a cosine to cos_min_ratio."""

    kind: Literal["warmup_cosine_lr"] = "warmup_cosine_lr"
    total_num_steps: Positive
    """Step at which the ratio reaches cos_min_ratio."""
    warmup_min_ratio: NonNegativeReal = 0.0
    """Ratio at the start."""
    warmup_num_steps: Positive = 1000
    """Steps of the rise; fewer than 2 count as 2."""
    cos_min_ratio: NonNegativeReal = 0.0001
    """Ratio at the end."""
    after_total: Literal["hold", "swing"] = "hold"
    """After total_num_steps: stay at cos_min_ratio, or swing on along the cosine, as DeepSpeed 0.16 did."""
    warmup_type: WarmupType = "log"
    """Shape of the rise: with the logarithm of the step, or along a line."""


class LrRangeTest(Section):
    """Rises without end, to find the largest rate that trains (Smith 2017, arXiv:1506.01186, section 3.3)."""

    kind: Literal["lr_range_test"] = "lr_range_test"
    lr_range_test_min_lr: PerGroup = 0.001
    """Rate at the start."""
    lr_range_test_step_size: Positive = 2000
    """Steps over which the rate grows by lr_range_test_step_rate times the first one."""
    lr_range_test_step_rate: Real = 1.0
    """Growth per lr_range_test_step_size steps, relative to the first rate."""
    lr_range_test_staircase: Flag = False
    """Grow in stairs of lr_range_test_step_size steps instead of at every step."""


ScheduleConfig = Annotated[
    Constant
    | Linear
    | Cosine
    | Polynomial
    | Exponential
    | Piecewise
    | OneCycle
    | WarmupLr
    | WarmupDecayLr
    | WarmupCosineLr
    | LrRangeTest,
    Field(discriminator="kind"),
    BeforeValidator(named),
]
