"""Configuration: frozen, typed data that answers without torch.

config = Config.load("config.json", overrides={"zero.stage": 2})
batch = config.batch.resolve(data_parallel_size=8)
for origin in explain(config): ...
"""

from trilithon.config.base import Dtype, Section
from trilithon.config.batch import BatchConfig, ResolvedBatch, data_parallel_size
from trilithon.config.checkpoints import CheckpointConfig
from trilithon.config.comm import CommConfig
from trilithon.config.compressed import ApmSqueeze, OneBitAdam, OneBitLamb, ZeroOneAdam
from trilithon.config.mesh import Axes, MeshConfig, TensorConfig
from trilithon.config.moe import MoEConfig
from trilithon.config.monitor import MonitorConfig
from trilithon.config.offload import OffloadConfig
from trilithon.config.optimizer import Adagrad, Adam, AdamW, Lamb, Lion, OptimizerConfig, Sgd
from trilithon.config.origin import Origin, Problem, Source
from trilithon.config.precision import Bf16, Fp16, Fp32, NonFinite, PrecisionConfig
from trilithon.config.recompute import RecomputeConfig
from trilithon.config.root import Config, Examined, examine, explain
from trilithon.config.schedule import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    LrRangeTest,
    OneCycle,
    Piecewise,
    Polynomial,
    ScheduleConfig,
    WarmupCosineLr,
    WarmupDecayLr,
    WarmupLr,
)
from trilithon.config.zero import ZeroConfig

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "ApmSqueeze",
    "Axes",
    "BatchConfig",
    "Bf16",
    "CheckpointConfig",
    "CommConfig",
    "Config",
    "Constant",
    "Cosine",
    "Dtype",
    "Examined",
    "Exponential",
    "Fp16",
    "Fp32",
    "Lamb",
    "Linear",
    "Lion",
    "LrRangeTest",
    "MeshConfig",
    "MoEConfig",
    "MonitorConfig",
    "NonFinite",
    "OffloadConfig",
    "OneBitAdam",
    "OneBitLamb",
    "OneCycle",
    "OptimizerConfig",
    "Origin",
    "Piecewise",
    "Polynomial",
    "PrecisionConfig",
    "Problem",
    "RecomputeConfig",
    "ResolvedBatch",
    "ScheduleConfig",
    "Section",
    "Sgd",
    "Source",
    "TensorConfig",
    "WarmupCosineLr",
    "WarmupDecayLr",
    "WarmupLr",
    "ZeroConfig",
    "ZeroOneAdam",
    "data_parallel_size",
    "examine",
    "explain",
]
