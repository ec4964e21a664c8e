"""Update rules by name. With no optimizer configured, the caller passes one of their own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from trilithon.config.base import Betas, Flag, NonNegativeReal, PositiveReal, Section, named
from trilithon.config.compressed import ApmSqueeze, OneBitAdam, OneBitLamb, ZeroOneAdam


class Adam(Section):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980); weight decay is added to the gradient (L2)."""

    kind: Literal["adam"] = "adam"
    lr: NonNegativeReal = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: NonNegativeReal = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeReal = 0.0
    """L2 penalty: this times the weight is added to the gradient."""
    bias_correction: Flag = True
    """Divide the running means by one minus their decay to the power of the step."""


class AdamW(Section):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    lr: NonNegativeReal = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: NonNegativeReal = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeReal = 0.01
    """Each step multiplies the weight by one minus lr times this."""
    bias_correction: Flag = True
    """Divide the running means by one minus their decay to the power of the step."""


class Sgd(Section):
    """Stochastic gradient descent, with momentum as torch.optim.SGD defines it."""

    kind: Literal["sgd"] = "sgd"
    lr: NonNegativeReal = 1e-2
    """Learning rate."""
    momentum: NonNegativeReal = 0.0
    """Factor by which the previous direction is kept."""
    dampening: NonNegativeReal = 0.0
    """The gradient enters the momentum with weight one minus this."""
    nesterov: Flag = False
    """Look ahead along the momentum; needs momentum > 0 and dampening 0."""
    weight_decay: NonNegativeReal = 0.0
    """L2 penalty: this times the weight is added to the gradient."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Sgd:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov=true needs momentum > 0 and dampening 0, but momentum={self.momentum:g} and "
                f"dampening={self.dampening:g}; set them so, or nesterov=false"
            )
        return self


class Lion(Section):
    """Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum, decoupled weight decay."""

    kind: Literal["lion"] = "lion"
    lr: NonNegativeReal = 1e-4
    """Learning rate."""
    betas: Betas = (0.9, 0.99)
    """Interpolation for the update, and decay of the momentum."""
    weight_decay: NonNegativeReal = 0.0
    """Each step multiplies the weight by one minus lr times this."""


class Adagrad(Section):
    """Adagrad (Duchi et al. 2011): the gradient over the root of the sum of its squares so far."""

    kind: Literal["adagrad"] = "adagrad"
    lr: NonNegativeReal = 1e-2
    """Learning rate."""
    eps: NonNegativeReal = 1e-10
    """Added to the root of the sum of squares."""
    weight_decay: NonNegativeReal = 0.0
    """L2 penalty: this times the weight is added to the gradient."""


class Lamb(Section):
    """LAMB (You et al. 2020, arXiv:1904.00962): Adam's direction, scaled per parameter by a bounded trust ratio."""

    kind: Literal["lamb"] = "lamb"
    lr: NonNegativeReal = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: NonNegativeReal = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeReal = 0.0
    """This times the weight is added to Adam's direction before the trust ratio is taken."""
    min_ratio: NonNegativeReal = 0.01
    """Smallest trust ratio (norm of the weight over norm of the direction)."""
    max_ratio: PositiveReal = 10.0
    """Largest trust ratio."""
    bias_correction: Flag = True
    """Divide the running means by one minus their decay to the power of the step."""

    @model_validator(mode="after")
    def _ratio_range(self) -> Lamb:
        if self.min_ratio > self.max_ratio:
            raise ValueError(f"min_ratio={self.min_ratio:g} exceeds max_ratio={self.max_ratio:g}; swap or widen them")
        return self


OptimizerConfig = Annotated[
    Adam | AdamW | Sgd | Lion | Adagrad | Lamb | OneBitAdam | OneBitLamb | ZeroOneAdam | ApmSqueeze,
    Field(discriminator="kind"),
    BeforeValidator(named),
]
