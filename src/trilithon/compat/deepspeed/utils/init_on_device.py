"""`deepspeed.OnDevice`: tensors made inside have a type and a device."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch


class OnDevice:
    """Floating tensors made inside have `dtype`, all of them are on `device` ("meta": shapes without values)."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled, self._stack = dtype, torch.device(device), enabled, ExitStack()

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._stack = ExitStack()
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            self._stack.enter_context(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
