"""Reduction in rank order, apart from the communication that brings the pieces together.

Floating-point addition is not associative, so a sum over ranks depends on the order in which a backend happens to add.
Here it never does: the pieces are added in rank order, 16-bit and fp32 values in fp32, fp64 in fp64, and rounded to the
output's dtype once (`kernels.ordered_sum`). The result is the same for every bucket size, chunk size and transport.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trilithon.contracts import ReduceOp
from trilithon.errors import CollectiveError
from trilithon.kernels import ordered_sum

Add = Callable[[Tensor, Tensor, float, bool], None]
"""The signature of `kernels.ordered_sum`: (pieces [W, n], out [n], scale, accumulate)."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)


def ordered_reduce(pieces: Tensor, out: Tensor, op: ReduceOp, add: Add = ordered_sum) -> None:
    """out [n] becomes the sum, maximum or minimum over the rows of pieces [W, n], in order; NaN wins either.

    `out` may be one of the rows. Of bool, the maximum is "any" and the minimum "all".
    """
    if op is ReduceOp.SUM:
        if pieces.dtype in FLOATS:
            add(pieces, out, 1.0, False)
        else:
            out.copy_(pieces.sum(0))
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
