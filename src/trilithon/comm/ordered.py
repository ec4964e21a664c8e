"""Reduction in rank order, apart from the communication that brings the pieces together.

Floating-point addition is not associative, so a sum over ranks depends on the order in which a backend happens to add.
Here it never does: the pieces are added in rank order, 16-bit and fp32 values in fp32, fp64 in fp64, and rounded to the
output's dtype once. The result is the same for every bucket size, chunk size and transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trilithon.contracts import ReduceOp
from trilithon.errors import CollectiveError

Add = Callable[[Sequence[Tensor], Tensor, float, bool], None]
"""The signature of `ordered_sum`, for implementations of it in one pass."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
_CHUNK = 1 << 16  # elements: the fp32 accumulator of one chunk (256 KiB) stays in the second-level cache


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are added."""
    if dtype is torch.float64:
        return torch.float64
    return torch.float32 if dtype in FLOATS else torch.int64


def ordered_sum(pieces: Sequence[Tensor], out: Tensor, scale: float = 1.0, accumulate: bool = False) -> None:
    """out [n] becomes, or with `accumulate` gains, scale * (pieces[0] + pieces[1] + ...).

    pieces: tensors [n] of one dtype. Added in fp32 (fp64 for fp64), scaled there, rounded to `out`'s dtype once.
    `out` may be one of the pieces; it must not overlap them otherwise.
    """
    wide = wide_dtype(pieces[0].dtype)
    numel = out.numel()
    total = torch.empty(min(numel, _CHUNK), dtype=wide, device=out.device)
    for start in range(0, numel, _CHUNK):
        stop = min(start + _CHUNK, numel)
        part = total[: stop - start]
        part.copy_(pieces[0][start:stop])
        for piece in pieces[1:]:
            part.add_(piece[start:stop])
        if scale != 1.0:
            part.mul_(scale)
        if accumulate:
            out[start:stop].add_(part)
        else:
            out[start:stop].copy_(part)


def ordered_reduce(pieces: Sequence[Tensor], out: Tensor, op: ReduceOp, add: Add = ordered_sum) -> None:
    """out [n] becomes the sum, maximum or minimum of the pieces in rank order; NaN wins a maximum or minimum.

    `out` may be one of the pieces. Of bool, the maximum is "any" and the minimum "all".
    """
    if op is ReduceOp.SUM:
        if pieces[0].dtype in FLOATS:
            add(pieces, out, 1.0, False)
        else:
            out.copy_(torch.stack(list(pieces)).sum(0))
        return
    choose = torch.maximum if op is ReduceOp.MAX else torch.minimum
    best = pieces[0]
    for piece in pieces[1:]:
        best = choose(best, piece)
    out.copy_(best)


def refuse_unsupported(kind: str, dtype: torch.dtype, op: ReduceOp | None = None) -> None:
    """Raise CollectiveError when `kind` cannot be computed on this dtype; the message names both and a way out."""
    if dtype not in FLOATS and dtype not in INTEGERS:
        raise CollectiveError(
            f"{kind} does not support {dtype}. Supported: {', '.join(_short(d) for d in FLOATS + INTEGERS)}; "
            "send other dtypes as tensor.view(torch.uint8)."
        )
    if op is ReduceOp.SUM and dtype in (torch.bool, torch.uint8):
        raise CollectiveError(
            f"{kind} with SUM does not support {dtype}, which would overflow silently. "
            "Use MAX or MIN, or convert to torch.int64 first."
        )
    if kind == "reduce_scatter" and dtype not in FLOATS:
        raise CollectiveError(
            f"reduce_scatter does not support {dtype}, only {', '.join(_short(d) for d in FLOATS)}. "
            "Use all_reduce for integers."
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
