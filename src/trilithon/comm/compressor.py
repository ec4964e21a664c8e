"""The contract of compressors: fewer bytes that stand for a vector, and what they leave over.

A compressor is deterministic and keeps no state: what it loses stays with the caller, who adds it to what is sent next
time (error feedback; Tang et al. 2020, "APMSqueeze", arXiv:2008.11343, algorithm 1). The bytes that a row of c elements
takes follow from c alone, so all ranks know what arrives without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Which elements of a matrix [R, c] are there: the rest is zero and takes no part.

    real: per row, how many elements come before the padding. counted: per row, how many of those take part; the others
    lie anywhere, are zero, and only matter where an average is taken.
    """

    real: Sequence[int]
    counted: Sequence[int]


class Compressor(Protocol):
    """One way to say a vector in fewer bytes."""

    @property
    def name(self) -> str: ...

    def nbytes(self, numel: int) -> int:
        """Bytes of one row of `numel` elements, a multiple of 8."""
        ...

    def encode_(self, z: Tensor, payload: Tensor, rows: Rows) -> None:
        """payload [R, nbytes(c)] uint8 becomes the code of z [R, c] f32, and z what `decode` will not give back.

        Padding stays zero.
        """
        ...

    def decode(self, payload: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        """out [c] f32 becomes, or gains, what one row [nbytes(c)] stands for; its padding is arbitrary."""
        ...


def write_floats(payload: Tensor, values: Tensor) -> None:
    """payload [4 m] uint8, at any address, becomes the bytes of values [m] f32."""
    payload.copy_(values.contiguous().view(torch.uint8))


def read_floats(payload: Tensor) -> Tensor:
    """[m] f32 from [4 m] uint8 at any address."""
    return payload.clone().view(torch.float32)
