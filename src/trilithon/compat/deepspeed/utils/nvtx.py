"""`deepspeed.utils.nvtx`: named ranges for a profiler, where there is one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function, under its name in profiles."""

    @functools.wraps(func)
    def named(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return named


def range_push(name: str) -> None:
    """Begin a range of CUDA's profiler."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(name)


def range_pop() -> None:
    """End the innermost range."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()
