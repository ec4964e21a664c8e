"""`deepspeed.utils.nvtx`: named ranges in profiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import record_function


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    named: Callable[..., Any] = record_function(func.__qualname__)(func)
    return named
