"""Reads a configuration written for DeepSpeed: each of its keys is mapped, refused with a reason, or noted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from trilithon.config.origin import Draft


def recognise(raw: Mapping[str, Any], native: Collection[str], where: str) -> Literal["native", "deepspeed"]:
    """The format of a block, by its top-level keys."""
    return "native"


def read_deepspeed(
    raw: Mapping[str, Any], draft: Draft, *, auto: Mapping[str, Any], expected: Mapping[str, Any], release: str
) -> None:
    """Map a DeepSpeed block onto the native draft."""
    raise NotImplementedError
