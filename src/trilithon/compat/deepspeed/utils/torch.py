"""`deepspeed.utils.torch`: what this version of torch can do."""

from __future__ import annotations

import torch
from torch import Tensor


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch is at least and at most these versions, given as numbers such as 2.1."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    here = (major, minor)
    low = _parts(min_version) if min_version is not None else here
    high = _parts(max_version) if max_version is not None else here
    return low <= here <= high


def _parts(version: float) -> tuple[int, int]:
    major, _, minor = str(version).partition(".")
    return int(major), int(minor or 0)


def register_grad_hook(param: Tensor, hook: object) -> object:
    """`hook` after each accumulation into the gradient of a leaf."""
    return param.register_post_accumulate_grad_hook(hook)
