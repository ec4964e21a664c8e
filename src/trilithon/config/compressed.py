"""Update rules that communicate in compressed form once their variance has settled, for slow networks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from trilithon.config.base import (
    Betas,
    Count,
    Decay,
    Flag,
    Fraction,
    NonNegativeReal,
    Positive,
    PositiveReal,
    Section,
    named,
)


def _freeze_step(value: Any) -> Any:
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value) and value >= 1
    if whole:
        return int(value)
    if value == "auto":
        return value
    raise PydanticCustomError("freeze_step", 'must be a whole number of at least 1, or "auto"')


FreezeStep = Annotated[int | Literal["auto"], BeforeValidator(_freeze_step)]
ScaleNorm = Literal["l2", "l1"]


class OneBitAdam(Section):
    """1-bit Adam (Tang et al. 2021, arXiv:2102.02888): AdamW, then one bit of momentum per element and direction."""

    kind: Literal["onebit_adam"] = "onebit_adam"
    lr: NonNegativeReal = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: NonNegativeReal = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeReal = 0.0
    """Each step multiplies the weight by one minus lr times this."""
    bias_correction: Flag = True
    """Divide the running means by one minus their decay to the power of the step; that of the variance is frozen."""
    freeze_step: FreezeStep = "auto"
    """Updates of uncompressed warm-up (15 to 25 % of a run is usual). "auto": until the variance has settled."""
    scale_norm: ScaleNorm = "l2"
    """Scale of the signs: root mean square (l2), or mean magnitude (l1), which never loses more than there is."""
    auto_mask: Flag = True
    """Leave out elements whose variance is zero when it is frozen."""
    per_tensor_scaling: Flag = True
    """Bring the momentum of all parameters to one magnitude before a common scale is taken."""


class OneBitLamb(Section):
    """1-bit LAMB (Li et al. 2022, arXiv:2104.06069): LAMB, then compressed momentum and trust ratios carried on."""

    kind: Literal["onebit_lamb"] = "onebit_lamb"
    lr: NonNegativeReal = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: NonNegativeReal = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeReal = 0.0
    """This times the weight is added to Adam's direction before the trust ratio is taken."""
    min_ratio: NonNegativeReal = 0.01
    """Smallest trust ratio during warm-up."""
    max_ratio: PositiveReal = 10.0
    """Largest trust ratio during warm-up."""
    bias_correction: Flag = True
    """Divide the running means by one minus their decay to the power of the step; that of the variance is frozen."""
    freeze_step: FreezeStep = "auto"
    """Updates of uncompressed warm-up. "auto": until the variance has settled."""
    coeff_beta: Decay = 0.9
    """Decay of the running mean of each trust ratio, which is frozen at the end of the warm-up."""
    factor_max: PositiveReal = 4.0
    """Largest factor on a frozen trust ratio."""
    factor_min: NonNegativeReal = 0.5
    """Smallest factor on a frozen trust ratio."""
    factor_threshold: NonNegativeReal = 0.1
    """Share by which the factor may change from one step to the next."""
    scale_norm: ScaleNorm = "l2"
    """Scale of the signs: root mean square (l2), or mean magnitude (l1)."""
    auto_mask: Flag = True
    """Leave out elements whose variance is zero when it is frozen."""
    per_tensor_scaling: Flag = True
    """Bring the momentum of all parameters to one magnitude before a common scale is taken."""

    @model_validator(mode="after")
    def _ranges(self) -> OneBitLamb:
        for low, high in (("min_ratio", "max_ratio"), ("factor_min", "factor_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low):g} exceeds {high}={getattr(self, high):g}; swap them")
        return self


class ZeroOneAdam(Section):
    """0/1 Adam (Lu et al. 2023, arXiv:2202.06009): compressed from the start, and not at every step later on."""

    kind: Literal["zero_one_adam"] = "zero_one_adam"
    lr: NonNegativeReal = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: NonNegativeReal = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeReal = 0.0
    """Each step multiplies the weight by one minus lr times this."""
    bias_correction: Flag = True
    """Divide the running means by one minus their decay to the power of how often each was updated."""
    var_freeze_step: Positive = 100_000
    """Step after which the variance is never updated again and steps without communication begin (end of the rise of
    the learning rate, as a rule)."""
    var_update_scaler: Positive = 16
    """Updates of the variance before the interval between them doubles."""
    local_step_scaler: Positive = 32_678
    """Steps after the freeze before the interval between communications doubles."""
    local_step_clipper: Positive = 16
    """Longest interval between communications. 1: communicate at every step."""
    full_precision_warmup: Count = 0
    """Steps at the beginning that are uncompressed whatever the interval says."""
    scale_norm: ScaleNorm = "l2"
    """Scale of the signs: root mean square (l2), or mean magnitude (l1)."""
    auto_mask: Flag = True
    """Leave out elements whose variance is zero when it is frozen."""
    per_tensor_scaling: Flag = True
    """Bring all parameters to one magnitude, that of their momentum, before a common scale is taken."""


class SignCompressor(Section):
    """One bit per element and a scale."""

    kind: Literal["sign"] = "sign"
    norm: ScaleNorm = "l2"
    """Scale of the signs: root mean square (l2), or mean magnitude (l1)."""
    scope: Literal["buffer", "chunk"] = "buffer"
    """What shares a scale on the way to the servers: all that a rank sends, or each server's part."""


class TopKCompressor(Section):
    """The elements of largest magnitude and where they stand."""

    kind: Literal["topk"] = "topk"
    ratio: Annotated[Fraction, Field(gt=0)] = 0.01
    """Share of the elements that is sent."""
    value_bytes: Literal[2, 4] = 4
    """4: values in fp32. 2: in fp16."""


class QuantCompressor(Section):
    """A few bits per element between the smallest and the largest value."""

    kind: Literal["quant"] = "quant"
    bits: Literal[2, 4, 8] = 8
    """Bits per element."""
    block: Count = 0
    """Elements that share a range; 0: each server's part is one block."""


class Fp16Compressor(Section):
    """Half precision."""

    kind: Literal["fp16"] = "fp16"


class Bf16Compressor(Section):
    """bfloat16."""

    kind: Literal["bf16"] = "bf16"


class IdentityCompressor(Section):
    """fp32: nothing is lost, for comparison."""

    kind: Literal["identity"] = "identity"


CompressorConfig = Annotated[
    SignCompressor | TopKCompressor | QuantCompressor | Fp16Compressor | Bf16Compressor | IdentityCompressor,
    Field(discriminator="kind"),
    BeforeValidator(named),
]


class ApmSqueeze(Section):
    """APMSqueeze (Tang et al. 2020, arXiv:2008.11343): AdamW, then momentum averaged by any compressor."""

    kind: Literal["apmsqueeze"] = "apmsqueeze"
    lr: NonNegativeReal = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: NonNegativeReal = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeReal = 0.0
    """Each step multiplies the weight by one minus lr times this."""
    bias_correction: Flag = True
    """Divide the running means by one minus their decay to the power of the step; that of the variance is frozen."""
    freeze_step: FreezeStep = "auto"
    """Updates of uncompressed warm-up. "auto": until the variance has settled."""
    compressor: CompressorConfig = SignCompressor()
    """How ranks compress what they send."""
    server_compressor: CompressorConfig | None = None
    """How the means are compressed on the way back. null: as on the way there."""
    compress_target: Literal["momentum", "gradient"] = "momentum"
    """What is averaged in compressed form."""
    error_feedback: Flag = True
    """Send later what compression lost. false is for comparison."""
    auto_mask: Flag = True
    """Leave out elements whose variance is zero when it is frozen."""
    per_tensor_scaling: Flag = True
    """Bring the momentum of all parameters to one magnitude before it is compressed."""


def padded_numel(numel: int, world_size: int) -> int:
    """The least multiple of 8 * world_size that holds `numel` elements."""
    return -(-numel // (8 * world_size)) * 8 * world_size
