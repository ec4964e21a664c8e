"""The largest elements and where they stand: sparsification with error feedback (Stich et al. 2018, arXiv:1809.07599).

The k elements of largest magnitude are sent as they are, ties going to the lower index, so that the choice depends on
nothing but the values. What is lost is the rest, never more than (1 - k / n) of the square of the length.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from trilithon.comm.compressor import Rows, read_floats, write_floats

_SHORT_INDEX_NUMEL = 1 << 16
_F16_MAX = 65504.0


class TopK:
    """ratio: of the elements that are kept, at least one. value_bytes: 4 (fp32), or 2 (fp16, rounded)."""

    name = "topk"

    def __init__(self, ratio: float = 0.01, value_bytes: Literal[2, 4] = 4) -> None:
        self._ratio, self._value_bytes = ratio, value_bytes

    def nbytes(self, numel: int) -> int:
        kept = self._kept(numel)
        return 4 * numel if kept >= numel else kept * (_index_bytes(numel) + self._value_bytes)

    def encode_(self, z: Tensor, payload: Tensor, rows: Rows) -> None:
        for row, code in zip(z, payload, strict=True):
            kept = self._kept(row.numel())
            if kept >= row.numel():
                write_floats(code, row)
                row.zero_()
                continue
            index = largest(row, kept)
            values = row[index]
            at = kept * _index_bytes(row.numel())
            code[:at].copy_(_pack_index(index, row.numel()))
            if self._value_bytes == 4:
                write_floats(code[at:], values)
                row[index] = 0.0
            else:
                short = values.clamp(-_F16_MAX, _F16_MAX).to(torch.float16)
                code[at:].copy_(short.view(torch.uint8))
                row[index] = values - short.float()

    def decode(self, payload: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        kept = self._kept(out.numel())
        if not accumulate:
            out.zero_()
        if kept >= out.numel():
            out.add_(read_floats(payload))
            return
        at = kept * _index_bytes(out.numel())
        index = _unpack_index(payload[:at], out.numel())
        values = payload[at:].clone()
        floats = values.view(torch.float32) if self._value_bytes == 4 else values.view(torch.float16).float()
        out[index] += floats

    def _kept(self, numel: int) -> int:
        return max(1, math.ceil(self._ratio * numel))


def largest(z: Tensor, count: int) -> Tensor:
    """[count] int64, ascending: where the largest magnitudes of z stand; of equal ones, the first."""
    sizes = z.abs()
    bound = sizes.topk(count, sorted=True).values[-1]
    above = (sizes > bound).nonzero().view(-1)
    equal = (sizes == bound).nonzero().view(-1)[: count - above.numel()]
    return torch.cat([above, equal]).sort().values


def _index_bytes(numel: int) -> int:
    return 2 if numel <= _SHORT_INDEX_NUMEL else 4


def _pack_index(index: Tensor, numel: int) -> Tensor:
    return index.to(torch.int16 if _index_bytes(numel) == 2 else torch.int32).view(torch.uint8)


def _unpack_index(payload: Tensor, numel: int) -> Tensor:
    if _index_bytes(numel) == 4:
        return payload.clone().view(torch.int32).long()
    return payload.clone().view(torch.int16).long() & 0xFFFF
