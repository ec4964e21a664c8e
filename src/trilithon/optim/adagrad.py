"""Adagrad over slices (Duchi et al. 2011, "Adaptive subgradient methods", section 1.1, diagonal form)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trilithon.contracts import Slice
from trilithon.optim.elementwise import Elementwise, Settings
from trilithon.optim.formulas import adagrad_


class AdagradRule:
    """The sum of squares starts from a group's initial_accumulator_value, 0 if it has none."""

    name = "adagrad"

    def fields(self, settings: Settings) -> Mapping[str, float]:
        return {"sum": float(settings.get("initial_accumulator_value", 0.0))}

    def step(
        self, slice_: Slice, state: Mapping[str, Tensor], settings: Settings, update: int, grad_scale: float
    ) -> None:
        adagrad_(
            slice_.master,
            slice_.grad,
            state["sum"],
            slice_.low,
            lr=float(settings["lr"]),
            lr_decay=float(settings.get("lr_decay", 0.0)),
            eps=float(settings["eps"]),
            weight_decay=float(settings.get("weight_decay", 0.0)),
            step=update,
            grad_scale=-grad_scale if settings.get("maximize") else grad_scale,
        )


def adagrad(groups: Sequence[Settings]) -> Elementwise:
    """Each group holds lr and eps, and may hold lr_decay, weight_decay, initial_accumulator_value."""
    return Elementwise(AdagradRule(), groups)
