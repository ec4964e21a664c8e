"""`deepspeed.ops.adam`: Adam with decoupled weight decay unless the mode says otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trilithon.compat.deepspeed.ops.native_rules import ByName, adam_section, require_plain
from trilithon.config.compressed import OneBitAdam as OneBitAdamSection
from trilithon.config.compressed import ZeroOneAdam as ZeroOneAdamSection

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "OnebitAdam", "ZeroOneAdam"]


class FusedAdam(ByName):
    """Raises RuntimeError for amsgrad."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
        weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        require_plain("FusedAdam", amsgrad=amsgrad)
        super().__init__(params, adam_section(lr, bias_correction, betas, eps, weight_decay, adam_w_mode))


class DeepSpeedCPUAdam(ByName):
    """The same rule: it runs where its state rests. Raises RuntimeError for amsgrad and for state that is not fp32."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0,
        amsgrad: bool = False, adamw_mode: bool = True, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        require_plain("DeepSpeedCPUAdam", amsgrad=amsgrad, fp32_states=fp32_optimizer_states)
        super().__init__(model_params, adam_section(lr, bias_correction, betas, eps, weight_decay, adamw_mode))


class OnebitAdam(ByName):
    """1-bit Adam, by the name in the configuration."""

    section: OneBitAdamSection


class ZeroOneAdam(ByName):
    """0/1 Adam, by the name in the configuration."""

    section: ZeroOneAdamSection
