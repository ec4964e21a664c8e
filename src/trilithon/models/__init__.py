"""Models to train: a GPT and the presets of its shape. Names resolve lazily, so the presets come without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trilithon.models.gpt import GPT as GPT
    from trilithon.models.settings import PRESETS as PRESETS
    from trilithon.models.settings import GPTConfig as GPTConfig
    from trilithon.models.settings import preset as preset

_HOME = {
    "GPT": "trilithon.models.gpt",
    "GPTConfig": "trilithon.models.settings",
    "PRESETS": "trilithon.models.settings",
    "preset": "trilithon.models.settings",
}

__all__ = ["GPT", "PRESETS", "GPTConfig", "preset"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trilithon.models' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
