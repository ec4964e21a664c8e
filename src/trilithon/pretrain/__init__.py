"""Pre-training a language model on text: the job behind `trilithon train`.

    from trilithon.pretrain import load_pretrain, run
    report = run(load_pretrain(overrides={"data.paths": ["texts/"], "zero.stage": 3}))

Names resolve lazily, so that settings are read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trilithon.pretrain.artifacts import load_model as load_model
    from trilithon.pretrain.job import run as run
    from trilithon.pretrain.ranks import start_ranks as start_ranks
    from trilithon.pretrain.report import Report as Report
    from trilithon.pretrain.settings import PretrainConfig as PretrainConfig
    from trilithon.pretrain.settings import load_pretrain as load_pretrain

_HOME = {
    "PretrainConfig": "trilithon.pretrain.settings",
    "Report": "trilithon.pretrain.report",
    "load_model": "trilithon.pretrain.artifacts",
    "load_pretrain": "trilithon.pretrain.settings",
    "run": "trilithon.pretrain.job",
    "start_ranks": "trilithon.pretrain.ranks",
}

__all__ = ["PretrainConfig", "Report", "load_model", "load_pretrain", "run", "start_ranks"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trilithon.pretrain' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
