"""What an engine is made of; `build` makes these from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trilithon.checkpointing import Recompute
from trilithon.comm.ledger import Ledger
from trilithon.config import Config, ResolvedBatch
from trilithon.contracts import Precision, Update
from trilithon.engine.experts import SpreadExperts
from trilithon.engine.monitor import Monitor
from trilithon.engine.parallel import Parallel
from trilithon.engine.pipelined import Pipelined
from trilithon.engine.topology import Topology
from trilithon.optim.groups import Group
from trilithon.optim.learning_rate import LearningRate
from trilithon.zero.sharding import ZeroSharding


@dataclass(frozen=True)
class Parts:
    """What `build` made and the engine sequences."""

    config: Config
    batch: ResolvedBatch
    device: torch.device
    sharding: ZeroSharding
    update: Update | None
    precision: Precision
    rate: LearningRate
    groups: Sequence[Group]
    ledger: Ledger
    topology: Topology
    parallel: Parallel
    low: torch.dtype | None  # what floating inputs are cast to
    monitor: Monitor | None = None
    experts: SpreadExperts = field(default_factory=SpreadExperts)
    recompute: Recompute | None = None
    pipelined: Pipelined | None = None  # the model is a list of layers, on one stage or several
    tiled: bool = False  # linear layers were tiled for this engine, which makes them plain again
