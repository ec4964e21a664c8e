"""What an engine is made of; `build` makes these from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from trilithon.checkpointing import Recompute
from trilithon.comm.collectives import Group as Communicator
from trilithon.comm.ledger import Ledger
from trilithon.config import Config, ResolvedBatch
from trilithon.contracts import Precision, Update
from trilithon.engine.experts import SpreadExperts
from trilithon.engine.monitor import Monitor
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
    process_groups: Sequence[dist.ProcessGroup]  # made for this engine, which ends them
    writers: Callable[[], Communicator]  # makes the group that checkpoints are written in; collective
    low: torch.dtype | None  # what floating inputs are cast to
    monitor: Monitor | None = None
    experts: SpreadExperts = field(default_factory=SpreadExperts)
    recompute: Recompute | None = None
    tiled: bool = False  # linear layers were tiled for this engine, which makes them plain again
