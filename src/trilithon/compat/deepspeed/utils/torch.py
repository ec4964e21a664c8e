"""`deepspeed.utils.torch`: what this version of torch can do."""

from __future__ import annotations

import torch


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch is at least and at most these versions, given as numbers such as 2.1."""
    versions = (f"{version or torch.__version__}.0".split(".") for version in (min_version, None, max_version))
    low, here, high = ((int(major), int(minor)) for major, minor, *_ in versions)
    return low <= here <= high
