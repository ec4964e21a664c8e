"""What a sharding is told about its surroundings: the groups it talks in, and the number formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trilithon.contracts import Collectives


@dataclass(frozen=True, slots=True)
class Communicators:
    """Groups for what may be in flight together: agreements, gathers of values, and reductions of gradients.

    alike: for agreements about what only the ranks of one pipeline stage hold; None where all ranks hold the same.
    """

    control: Collectives
    gather: Collectives
    reduce: Collectives
    alike: Collectives | None = None


@dataclass(frozen=True, slots=True)
class Precisions:
    """low: what forward computes in (None keeps each parameter's own type); wire, accumulate: None follows `low`."""

    low: torch.dtype | None = None
    wire: torch.dtype | None = None
    accumulate: torch.dtype | None = None
