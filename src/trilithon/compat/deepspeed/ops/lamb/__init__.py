"""`deepspeed.ops.lamb`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trilithon.compat.deepspeed.ops.native_rules import ByName, require_plain
from trilithon.config.optimizer import Lamb

__all__ = ["FusedLamb", "OnebitLamb"]


class FusedLamb(ByName):
    """max_coeff and min_coeff bound the trust ratio. Raises RuntimeError for amsgrad and eps_inside_sqrt."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0, max_grad_norm: float = 0.0, max_coeff: float = 10.0, min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:  # fmt: skip
        require_plain("FusedLamb", amsgrad=amsgrad)
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


class OnebitLamb(ByName):
    """1-bit LAMB, by the name in the configuration."""
