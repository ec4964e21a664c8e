"""`deepspeed.utils.nvtx`: named ranges for a profiler, where there is one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """The function, under its name in profiles."""

    @functools.wraps(func)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
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
