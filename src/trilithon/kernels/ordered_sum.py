"""The sum of what several ranks sent, in rank order and in fp32, in one pass over the pieces.

Adding in a fixed order and a fixed precision makes a reduction independent of buckets, timing and how many elements
travel together; it is what `Collectives.reduce_scatter` promises. Per element, each operation rounded once:

    a = widen(pieces[0]); a = a + widen(pieces[r]) for r = 1 .. W - 1; a = a * scale; a = widen(out) + a if accumulate
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trilithon.kernels.bits import load, store
from trilithon.kernels.chunks import chunks
from trilithon.kernels.compiled import Array, array, compiled

_BLOCK_NUMEL = 4096  # partial sums that stay in the first-level cache
_MAX_COMPILED = 16


def ordered_sum(pieces: Tensor | Sequence[Tensor], out: Tensor, scale: float = 1.0, accumulate: bool = False) -> None:
    """out [n] becomes, or with `accumulate` gains, scale * (pieces[0] + pieces[1] + ...), rounded once to its dtype.

    pieces: [W, n], or W tensors [n] of one dtype, of bf16, f16, f32 or f64, contiguous. out: [n] floating, and may be
    one of the pieces. The sum is kept in fp32, or in fp64 if `pieces` or `out` is fp64.
    """
    rows = tuple(pieces)
    # Each number of pieces is compiled by itself; beyond a few, the additions outweigh what one pass saves.
    loop = compiled(ordered_sum_loop, (rows, out), (scale, accumulate)) if len(rows) <= _MAX_COMPILED else None
    if loop is None:
        ordered_sum_torch(rows, out, scale, accumulate)
    else:
        loop(tuple(array(row) for row in rows), array(out), scale, accumulate)


def ordered_sum_loop(pieces: tuple[Array, ...], out: Array, scale: float, accumulate: bool) -> None:
    """One pass, for `compiled`, a block at a time so that the partial sums never go to memory."""
    total = np.empty(_BLOCK_NUMEL, np.float32)
    numel = out.shape[0]
    for start in range(0, numel, _BLOCK_NUMEL):
        size = min(_BLOCK_NUMEL, numel - start)
        here = out[start : start + size]
        for rank in range(len(pieces)):
            row = pieces[rank][start : start + size]
            if rank == 0:
                for i in range(size):
                    total[i] = load(row, i)
            else:
                for i in range(size):
                    total[i] += load(row, i)
        if accumulate:
            for i in range(size):
                store(here, i, load(here, i) + total[i] * scale)
        else:
            for i in range(size):
                store(here, i, total[i] * scale)


@torch.no_grad()
def ordered_sum_torch(pieces: Sequence[Tensor], out: Tensor, scale: float, accumulate: bool) -> None:
    """The plain torch twin."""
    wide = torch.float64 if torch.float64 in (pieces[0].dtype, out.dtype) else torch.float32
    for part in chunks(out):
        total = pieces[0][part].to(wide, copy=True)
        for piece in pieces[1:]:
            total.add_(piece[part])
        if scale != 1.0:
            total.mul_(scale)
        if accumulate:
            total = out[part].to(wide).add_(total)
        out[part].copy_(total)
