"""Compressors that only change the number format: fp16, bf16, and fp32, which loses nothing and is for comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from trilithon.comm.compressor import Rows

_DTYPES = {"identity": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Cast:
    """name: identity, fp16 (values beyond its range are cut off and kept as what is lost) or bf16."""

    def __init__(self, name: str) -> None:
        self.name, self._dtype = name, _DTYPES[name]

    def nbytes(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    def encode_(self, z: Tensor, payload: Tensor, rows: Rows) -> None:
        limit = torch.finfo(self._dtype).max
        short = z.clamp(-limit, limit).to(self._dtype)
        payload.copy_(short.view(torch.uint8).view(z.shape[0], -1))
        z.sub_(short.float())

    def decode(self, payload: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        values = payload.clone().view(self._dtype)
        out.add_(values) if accumulate else out.copy_(values)
