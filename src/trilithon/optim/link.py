"""What an update rule that communicates itself gets from whoever holds the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trilithon.contracts import Collectives


@dataclass(frozen=True, slots=True)
class Link:
    """gradients: (name, this rank's own flat gradient) of every parameter that got one on any rank in this window.

    shapes: of all trainable parameters, whole. whole: every rank updates every parameter, so state is complete here.
    """

    group: Collectives
    gradients: Callable[[], Iterator[tuple[str, Tensor]]]
    shapes: Mapping[str, torch.Size]
    whole: bool
    device: torch.device
