"""Stochastic gradient descent over slices, with the momentum of torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trilithon.contracts import Slice
from trilithon.kernels import sgd_step
from trilithon.optim.elementwise import Elementwise, Settings


class SgdRule:
    """A buffer exists only while a group's momentum is not 0."""

    name = "sgd"

    def fields(self, settings: Settings) -> Mapping[str, float]:
        return {"momentum_buffer": 0.0} if settings.get("momentum", 0.0) else {}

    def step(
        self, slice_: Slice, state: Mapping[str, Tensor], settings: Settings, update: int, grad_scale: float
    ) -> None:
        momentum = float(settings.get("momentum", 0.0))
        sgd_step(
            slice_.master,
            slice_.grad,
            state["momentum_buffer"] if momentum else None,
            slice_.low,
            lr=float(settings["lr"]),
            momentum=momentum,
            dampening=float(settings.get("dampening", 0.0)),
            nesterov=bool(settings.get("nesterov", False)),
            weight_decay=float(settings.get("weight_decay", 0.0)),
            first=update == 1,
            grad_scale=-grad_scale if settings.get("maximize") else grad_scale,
        )


def sgd(groups: Sequence[Settings]) -> Elementwise:
    """Each group holds lr, and may hold momentum, dampening, nesterov, weight_decay."""
    return Elementwise(SgdRule(), groups)
