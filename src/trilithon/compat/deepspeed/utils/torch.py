"""`deepspeed.utils.torch`: what this version of torch can do."""

from __future__ import annotations

import torch
from torch import Tensor


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch is at least and at most these versions, given as numbers such as 2.1."""
    here, low, high = (_parts(version or torch.__version__) for version in (None, min_version, max_version))
    return low <= here <= high


def _parts(version: object) -> tuple[int, ...]:
    return tuple(int(part) for part in f"{version}.0".split(".")[:2])


def register_grad_hook(param: Tensor, hook: object) -> object:
    """`hook` after each accumulation into the gradient of a leaf."""
    return param.register_post_accumulate_grad_hook(hook)
