"""Adam and AdamW over slices (Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trilithon.contracts import Slice
from trilithon.kernels import adam_step
from trilithon.optim.elementwise import Elementwise, Settings


class AdamRule:
    """decoupled: what a group without its own "decoupled_weight_decay" does with weight_decay (True is AdamW)."""

    def __init__(self, *, decoupled: bool) -> None:
        self._decoupled = decoupled
        self.name = "adamw" if decoupled else "adam"
        self.resembles = ("adam",) if decoupled else ("adamw",)

    def fields(self, settings: Settings) -> Mapping[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def step(
        self, slice_: Slice, state: Mapping[str, Tensor], settings: Settings, update: int, grad_scale: float
    ) -> None:
        beta1, beta2 = settings["betas"]
        adam_step(
            slice_.master,
            slice_.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            slice_.low,
            lr=float(settings["lr"]),
            betas=(float(beta1), float(beta2)),
            eps=float(settings["eps"]),
            weight_decay=float(settings.get("weight_decay", 0.0)),
            decoupled=bool(settings.get("decoupled_weight_decay", self._decoupled)),
            step=update,
            bias_correction=bool(settings.get("bias_correction", True)),
            grad_scale=-grad_scale if settings.get("maximize") else grad_scale,
        )


def adam(groups: Sequence[Settings]) -> Elementwise:
    """Adam: weight decay joins the gradient. Each group holds lr, betas, eps, and may hold weight_decay, ..."""
    return Elementwise(AdamRule(decoupled=False), groups)


def adamw(groups: Sequence[Settings]) -> Elementwise:
    """AdamW: weight decay shrinks the weights. Each group holds lr, betas, eps, and may hold weight_decay, ..."""
    return Elementwise(AdamRule(decoupled=True), groups)
