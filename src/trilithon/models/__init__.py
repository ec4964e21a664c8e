"""Models to train, shaped as GPT, Llama and BERT. Names resolve lazily, so shapes and presets come without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trilithon.models.bert import Bert as Bert
    from trilithon.models.gpt import GPT as GPT
    from trilithon.models.llama import Llama as Llama
    from trilithon.models.settings import PRESETS as PRESETS
    from trilithon.models.settings import BertConfig as BertConfig
    from trilithon.models.settings import GPTConfig as GPTConfig
    from trilithon.models.settings import LlamaConfig as LlamaConfig
    from trilithon.models.settings import preset as preset

_HOME = {
    "Bert": "trilithon.models.bert",
    "BertConfig": "trilithon.models.settings",
    "Llama": "trilithon.models.llama",
    "LlamaConfig": "trilithon.models.settings",
    "GPT": "trilithon.models.gpt",
    "GPTConfig": "trilithon.models.settings",
    "PRESETS": "trilithon.models.settings",
    "preset": "trilithon.models.settings",
}

__all__ = ["GPT", "PRESETS", "Bert", "BertConfig", "GPTConfig", "Llama", "LlamaConfig", "preset"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trilithon.models' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
