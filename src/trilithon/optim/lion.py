"""Lion over slices (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trilithon.contracts import Slice
from trilithon.kernels import lion_step
from trilithon.optim.elementwise import Elementwise, Settings


class LionRule:
    """One moment; every element moves by exactly lr, or not at all."""

    name = "lion"

    def fields(self, settings: Settings) -> Mapping[str, float]:
        return {"exp_avg": 0.0}

    def step(
        self, slice_: Slice, state: Mapping[str, Tensor], settings: Settings, update: int, grad_scale: float
    ) -> None:
        beta1, beta2 = settings["betas"]
        lion_step(
            slice_.master,
            slice_.grad,
            state["exp_avg"],
            slice_.low,
            lr=float(settings["lr"]),
            betas=(float(beta1), float(beta2)),
            weight_decay=float(settings.get("weight_decay", 0.0)),
            grad_scale=grad_scale,
        )


def lion(groups: Sequence[Settings]) -> Elementwise:
    """Each group holds lr and betas, and may hold weight_decay."""
    return Elementwise(LionRule(), groups)
