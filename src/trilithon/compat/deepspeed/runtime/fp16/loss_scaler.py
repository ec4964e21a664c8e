"""`deepspeed.runtime.fp16.loss_scaler`: the classes that its files mention, over our own loss scales."""

from __future__ import annotations

from torch import Tensor

from trilithon.optim import DynamicScale


class LossScalerBase:
    """A scale for losses. cur_scale: the present one."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """The scale is fixed."""

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """A fixed scale."""


class DynamicLossScaler(LossScalerBase):
    """A scale that halves after overflows and doubles after `scale_window` steps without one."""

    dynamic = True

    def __init__(
        self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000, min_scale: float = 1.0,
        delayed_shift: int = 1, consecutive_hysteresis: bool = False, raise_error_at_min_scale: bool = True,
        dtype: object = None,
    ) -> None:  # fmt: skip
        super().__init__(init_scale)
        if scale_factor != 2.0:
            raise ValueError(f"scale_factor={scale_factor}: loss scales halve and double here; use 2.0.")
        self._rule = DynamicScale(
            init_scale, window=scale_window, hysteresis=delayed_shift, consecutive_hysteresis=consecutive_hysteresis,
            min_scale=min_scale, max_scale=2.0**127, give_up_after=1 if raise_error_at_min_scale else 2**62,
        )  # fmt: skip

    def update_scale(self, overflow: bool) -> None:
        """Raises NonFiniteError at an overflow at `min_scale`."""
        self._rule.accept(not overflow)
        self.cur_scale = self._rule.scale
