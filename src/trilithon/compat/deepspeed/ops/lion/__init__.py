"""`deepspeed.ops.lion`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trilithon.compat.deepspeed.ops.native_rules import ByName, require_plain
from trilithon.config.optimizer import Lion

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(ByName):
    """Lion with DeepSpeed's defaults."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, Lion(lr=lr, betas=betas, weight_decay=weight_decay))


class DeepSpeedCPULion(ByName):
    """The same rule: it runs where its state rests."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        require_plain("DeepSpeedCPULion", fp32_states=fp32_optimizer_states)
        super().__init__(model_params, Lion(lr=lr, betas=betas, weight_decay=weight_decay))
