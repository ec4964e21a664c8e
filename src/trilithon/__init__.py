"""trilithon: train models whose weights, gradients and optimizer state do not fit on one device.

    engine = trilithon.initialize(model, config="config.json")

Only the names in `__all__` are promised; they resolve lazily (PEP 562), so that importing the package stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trilithon.version import __version__

_HOME = {
    "initialize": "trilithon.engine.build",
    "Engine": "trilithon.engine.engine",
    "LayerSpec": "trilithon.parallel.pipeline",
    "PipelineModule": "trilithon.parallel.pipeline",
    "TiedLayerSpec": "trilithon.parallel.pipeline",
    "Config": "trilithon.config",
    "zero": "trilithon.zero",
    "moe": "trilithon.parallel.moe",
    "MoE": "trilithon.parallel.moe",
    "TrilithonError": "trilithon.errors",
    "BatchError": "trilithon.errors",
    "ConfigError": "trilithon.errors",
    "DataError": "trilithon.errors",
    "CheckpointError": "trilithon.errors",
    "ProtocolError": "trilithon.errors",
    "ShardedParameterError": "trilithon.errors",
    "CollectiveError": "trilithon.errors",
    "TierError": "trilithon.errors",
    "NonFiniteError": "trilithon.errors",
    "LaunchError": "trilithon.errors",
}

__all__ = [
    "BatchError",
    "CheckpointError",
    "CollectiveError",
    "Config",
    "ConfigError",
    "DataError",
    "Engine",
    "LaunchError",
    "LayerSpec",
    "MoE",
    "NonFiniteError",
    "PipelineModule",
    "ProtocolError",
    "ShardedParameterError",
    "TiedLayerSpec",
    "TierError",
    "TrilithonError",
    "__version__",
    "initialize",
    "moe",
    "zero",
]

if TYPE_CHECKING:
    from trilithon import zero as zero
    from trilithon.config import Config as Config
    from trilithon.engine.build import initialize as initialize
    from trilithon.engine.engine import Engine as Engine
    from trilithon.errors import BatchError as BatchError
    from trilithon.errors import CheckpointError as CheckpointError
    from trilithon.errors import CollectiveError as CollectiveError
    from trilithon.errors import ConfigError as ConfigError
    from trilithon.errors import DataError as DataError
    from trilithon.errors import LaunchError as LaunchError
    from trilithon.errors import NonFiniteError as NonFiniteError
    from trilithon.errors import ProtocolError as ProtocolError
    from trilithon.errors import ShardedParameterError as ShardedParameterError
    from trilithon.errors import TierError as TierError
    from trilithon.errors import TrilithonError as TrilithonError
    from trilithon.parallel import moe as moe
    from trilithon.parallel.moe import MoE as MoE
    from trilithon.parallel.pipeline import LayerSpec as LayerSpec
    from trilithon.parallel.pipeline import PipelineModule as PipelineModule
    from trilithon.parallel.pipeline import TiedLayerSpec as TiedLayerSpec


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'trilithon' has no attribute {name!r}")
    module = import_module(home)
    value = module if name in ("moe", "zero") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
