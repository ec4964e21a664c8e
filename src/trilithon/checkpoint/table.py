"""What one rank holds of a run's tensors, as plain tables: the seam between whoever owns state and whoever stores it.

A `Span` is a contiguous range of one flattened tensor. A `Holding` is a group of spans whose values come, or go,
together: the state of one slice, say, which may have to be fetched from another tier for the time of a context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, start + numel) of tensor `name` of `part`, which lie at `offset` of the holding's flat tensor.

    numel is 0 only for a tensor without elements, which is recorded and takes no bytes.
    """

    part: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    numel: int
    offset: int

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.numel == math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Holding:
    """Spans that are here together. key: for messages.

    open(): a context with one flat tensor for each part (or for each "part:name" when parts do not share one), in which
    the spans lie. When a load asks, what is written to these tensors stays. replicated: other ranks hold the same, so
    that one of them writes each piece.
    """

    key: str
    spans: tuple[Span, ...]
    open: Callable[[], AbstractContextManager[Mapping[str, Tensor]]]
    replicated: bool = False


def values_of(span: Span, tensors: Mapping[str, Tensor]) -> Tensor:
    """The flat values [numel] of a span inside an opened holding."""
    flat = tensors[f"{span.part}:{span.name}"] if f"{span.part}:{span.name}" in tensors else tensors[span.part]
    return flat[span.offset : span.offset + span.numel]
