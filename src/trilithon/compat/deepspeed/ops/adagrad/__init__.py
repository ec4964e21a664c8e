"""`deepspeed.ops.adagrad`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trilithon.compat.deepspeed.ops.native_rules import ByName, require_plain
from trilithon.config.optimizer import Adagrad

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(ByName):
    """Adagrad; it runs where its state rests."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0,
        amsgrad: bool = False, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        require_plain("DeepSpeedCPUAdagrad", amsgrad=amsgrad, fp32_states=fp32_optimizer_states)
        super().__init__(model_params, Adagrad(lr=lr, eps=eps, weight_decay=weight_decay))
