"""The sum of what several ranks sent, in rank order and in fp32, in one pass over the pieces.

Adding in a fixed order and a fixed precision makes a reduction independent of buckets, timing and how many elements
travel together; it is what `Collectives.reduce_scatter` promises. Per element, each operation rounded once:

    a = widen(pieces[0]); a = a + widen(pieces[r]) for r = 1 .. W - 1; a = a * scale; a = widen(out) + a if accumulate
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trilithon.kernels.bits import load, store
from trilithon.kernels.chunks import chunks
from trilithon.kernels.compiled import Array, arrays, compiled

_BLOCK_NUMEL = 4096  # partial sums that stay in the first-level cache


def ordered_sum(pieces: Tensor, out: Tensor, scale: float = 1.0, accumulate: bool = False) -> None:
    """out [n] becomes, or with `accumulate` gains, scale * (pieces[0] + pieces[1] + ...), rounded once to its dtype.

    pieces: [W, n] bf16, f16, f32 or f64, rows contiguous; out: [n] floating, and may be a row of `pieces`.
    The sum is kept in fp32, or in fp64 if `pieces` or `out` is fp64.
    """
    operands = (pieces, out)
    loop = compiled(ordered_sum_loop, operands, (scale, accumulate))
    if loop is None:
        ordered_sum_torch(pieces, out, scale, accumulate)
    else:
        loop(*arrays(operands), scale, accumulate)


def ordered_sum_loop(pieces: Array, out: Array, scale: float, accumulate: bool) -> None:
    """One pass, for `compiled`, a block at a time so that the partial sums never go to memory."""
    total = np.empty(_BLOCK_NUMEL, np.float32)
    numel = out.shape[0]
    for start in range(0, numel, _BLOCK_NUMEL):
        size = min(_BLOCK_NUMEL, numel - start)
        here = out[start : start + size]
        row = pieces[0, start : start + size]
        for i in range(size):
            total[i] = load(row, i)
        for rank in range(1, pieces.shape[0]):
            row = pieces[rank, start : start + size]
            for i in range(size):
                total[i] += load(row, i)
        if accumulate:
            for i in range(size):
                store(here, i, load(here, i) + total[i] * scale)
        else:
            for i in range(size):
                store(here, i, total[i] * scale)


@torch.no_grad()
def ordered_sum_torch(pieces: Tensor, out: Tensor, scale: float, accumulate: bool) -> None:
    """The plain torch twin."""
    wide = torch.float64 if torch.float64 in (pieces.dtype, out.dtype) else torch.float32
    for part in chunks(out):
        total = pieces[0, part].to(wide, copy=True)
        for row in pieces[1:, part]:
            total.add_(row)
        if scale != 1.0:
            total.mul_(scale)
        if accumulate:
            total = out[part].to(wide).add_(total)
        out[part].copy_(total)
