"""Optimizers by DeepSpeed's names and arguments, as sections of our configuration.

Alone they are torch optimizers; an engine runs their rule over slices, and their state rests where offload says. So the
classes "for the CPU" have the same rule as the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from trilithon.config.optimizer import Adagrad, Adam, AdamW, Lamb, Lion, OptimizerConfig
from trilithon.optim.named import Named


class ByName(Named):
    """A named optimizer that can also be made from a section that was read already."""

    @classmethod
    def of(cls, params: Iterable[Any], section: OptimizerConfig) -> Self:
        made = cls.__new__(cls)
        Named.__init__(made, params, section)
        return made

    def _require(self, amsgrad: bool = False, fp32_states: bool = True) -> None:
        name = type(self).__name__
        if amsgrad:
            raise RuntimeError(f"{name} does not support the AMSGrad variant; pass torch.optim.AdamW(amsgrad=True).")
        if not fp32_states:
            raise RuntimeError(f"{name}: fp32_optimizer_states=False is not in this version; state is always fp32.")


def _adam(
    lr: float, bias_correction: bool, betas: Iterable[float], eps: float, weight_decay: float, decoupled: bool
) -> Adam | AdamW:
    first, second = betas
    kind = AdamW if decoupled else Adam
    return kind(lr=lr, betas=(first, second), eps=eps, weight_decay=weight_decay, bias_correction=bool(bias_correction))


class FusedAdam(ByName):
    """Adam, with decoupled weight decay unless the mode says otherwise. Raises RuntimeError for amsgrad."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
        weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        self._require(amsgrad)
        super().__init__(params, _adam(lr, bias_correction, betas, eps, weight_decay, adam_w_mode))


class DeepSpeedCPUAdam(ByName):
    """Raises RuntimeError for amsgrad and for state that is not fp32."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0,
        amsgrad: bool = False, adamw_mode: bool = True, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        self._require(amsgrad, fp32_optimizer_states)
        super().__init__(model_params, _adam(lr, bias_correction, betas, eps, weight_decay, adamw_mode))


class DeepSpeedCPUAdagrad(ByName):
    """Raises RuntimeError for amsgrad and for state that is not fp32."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0,
        amsgrad: bool = False, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        self._require(amsgrad, fp32_optimizer_states)
        super().__init__(model_params, Adagrad(lr=lr, eps=eps, weight_decay=weight_decay))


class FusedLamb(ByName):
    """max_coeff and min_coeff bound the trust ratio. Raises RuntimeError for amsgrad and eps_inside_sqrt."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0, max_grad_norm: float = 0.0, max_coeff: float = 10.0, min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:  # fmt: skip
        self._require(amsgrad)
        if eps_inside_sqrt or max_grad_norm:
            raise RuntimeError(
                f"FusedLamb: eps_inside_sqrt={eps_inside_sqrt} and max_grad_norm={max_grad_norm} are not in this "
                "version. eps is added outside the root; write gradient_clipping in the configuration."
            )
        section = Lamb(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, min_ratio=min_coeff, max_ratio=max_coeff,
            bias_correction=bias_correction,
        )  # fmt: skip
        super().__init__(params, section)


class FusedLion(ByName):
    """Lion with DeepSpeed's defaults."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, Lion(lr=lr, betas=betas, weight_decay=weight_decay))


class DeepSpeedCPULion(ByName):
    """Raises RuntimeError for state that is not fp32."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        self._require(fp32_states=fp32_optimizer_states)
        super().__init__(model_params, Lion(lr=lr, betas=betas, weight_decay=weight_decay))


class OnebitAdam(ByName):
    """1-bit Adam, by the name in the configuration."""


class ZeroOneAdam(ByName):
    """0/1 Adam, by the name in the configuration."""


class OnebitLamb(ByName):
    """1-bit LAMB, by the name in the configuration."""
