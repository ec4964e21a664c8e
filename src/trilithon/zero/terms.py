"""What a sharding is told about its surroundings: the groups it talks in, and the number formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trilithon.contracts import Collectives


@dataclass(frozen=True, slots=True)
class Communicators:
    """Three groups over the same ranks, since gathers, reductions and agreements may be in flight together."""

    control: Collectives
    gather: Collectives
    reduce: Collectives


@dataclass(frozen=True, slots=True)
class Precisions:
    """low: what forward computes in (None keeps each parameter's own type); wire, accumulate: None follows `low`."""

    low: torch.dtype | None = None
    wire: torch.dtype | None = None
    accumulate: torch.dtype | None = None
