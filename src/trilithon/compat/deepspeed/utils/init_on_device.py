"""`deepspeed.OnDevice`: tensors made inside have a type and a device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

import torch


class OnDevice(ExitStack):
    """Floating tensors made inside have `dtype`, all of them are on `device` ("meta": shapes without values)."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        super().__init__()
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled

    def __enter__(self) -> Self:
        if self._enabled:
            self.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            self.enter_context(self._device)
        return self
