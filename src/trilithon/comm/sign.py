"""One bit per element and one scale: the compressor of 1-bit Adam.

C(z) = s * sign(z) with sign(0) = +1. With the scale s = |z|_2 / sqrt(n) (root mean square) the length of z is kept, but
where few elements carry it, what is lost may be longer than z itself; with s = |z|_1 / n (mean magnitude) it never is.
Both appear in Tang et al. 2021, "1-bit Adam", arXiv:2102.02888, section 4 and the appendix on compression.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trilithon.comm.compressor import Rows, read_floats, write_floats
from trilithon.kernels import sign_decode, sign_encode_, sum_of_squares
from trilithon.kernels.chunks import chunks

SCALE_BYTES = 4


class Sign:
    """norm: of the scale. scope: one scale per row ("chunk"), or one for all rows of a call ("buffer")."""

    name = "sign"

    def __init__(self, norm: Literal["l2", "l1"] = "l2", scope: Literal["buffer", "chunk"] = "buffer") -> None:
        self._norm, self._scope = norm, scope

    def nbytes(self, numel: int) -> int:
        return numel // 8 + SCALE_BYTES

    def encode_(self, z: Tensor, payload: Tensor, rows: Rows) -> None:
        if self._scope == "buffer":
            scales = [self._scale(z.view(-1), sum(rows.counted))] * z.shape[0]
        else:
            scales = [self._scale(row, count) for row, count in zip(z, rows.counted, strict=True)]
        stacked = torch.tensor(scales, dtype=torch.float32, device=z.device)
        for row, code, scale, real, at in zip(z, payload, scales, rows.real, range(len(scales)), strict=True):
            sign_encode_(row, code[:-SCALE_BYTES], scale)
            row[real:].zero_()
            write_floats(code[-SCALE_BYTES:], stacked[at : at + 1])

    def decode(self, payload: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        scale = float(read_floats(payload[-SCALE_BYTES:]))
        sign_decode(payload[:-SCALE_BYTES], out, scale, accumulate)

    def _scale(self, z: Tensor, count: int) -> float:
        """In fp64, so that neither tiny nor huge elements are lost, then rounded to what travels."""
        if count == 0:
            return 0.0
        size = (sum_of_squares(z) / count) ** 0.5 if self._norm == "l2" else sum_of_magnitudes(z) / count
        return float(torch.tensor(size, dtype=torch.float32))


def sum_of_magnitudes(x: Tensor) -> float:
    """|x|_1 of a flat tensor, accumulated in fp64."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in chunks(x):
        total.add_(x[part].abs().sum(dtype=torch.float64))
    return float(total)
