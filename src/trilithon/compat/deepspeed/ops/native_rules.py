"""What the optimizers by name share: from DeepSpeed's arguments to a section of our configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from trilithon.config.optimizer import Adam, AdamW, OptimizerConfig
from trilithon.optim.named import Named


class ByName(Named):
    """A named optimizer that can also be made from a section that was read already."""

    @classmethod
    def of(cls, params: Iterable[Any], section: OptimizerConfig) -> Self:
        made = cls.__new__(cls)
        Named.__init__(made, params, section)
        return made


def require_plain(name: str, *, amsgrad: bool = False, fp32_states: bool = True) -> None:
    """Raises RuntimeError for what the rule does not have."""
    if amsgrad:
        raise RuntimeError(f"{name} does not support the AMSGrad variant; pass torch.optim.AdamW(amsgrad=True).")
    if not fp32_states:
        raise RuntimeError(f"{name}: fp32_optimizer_states=False is not in this version; state is always fp32.")


def adam_section(
    lr: float, bias_correction: bool, betas: Iterable[float], eps: float, weight_decay: float, decoupled: bool
) -> Adam | AdamW:
    first, second = betas
    kind = AdamW if decoupled else Adam
    return kind(lr=lr, betas=(first, second), eps=eps, weight_decay=weight_decay, bias_correction=bool(bias_correction))
