"""`deepspeed.runtime.zero.utils`."""

from __future__ import annotations

from torch import nn

from trilithon.compat.deepspeed.runtime.zero.partition_parameters import is_zero_param


class ZeRORuntimeException(RuntimeError):  # noqa: N818 (DeepSpeed's name)
    """A call or setting that does not go together with ZeRO."""


def is_zero3_model(module: nn.Module) -> bool:
    """Some parameter of the module is cut by stage 3."""
    return any(is_zero_param(param) for param in module.parameters())


__all__ = ["ZeRORuntimeException", "is_zero3_model"]
