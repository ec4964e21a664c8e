"""Triton twins of `sign_encode_` and `sign_decode`, one pass on a GPU.

Chosen by TRILITHON_KERNELS=triton. Tested against the torch twins in Triton's interpreter; they have not been run on a
GPU yet, so they are not the default there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256  # bytes of packed signs


@triton.jit
def _encode(z_ptr, bits_ptr, count, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, 8)
    index = byte[:, None] * 8 + place[None, :]
    inside = (byte < count)[:, None] & (place < 8)[None, :]
    z = tl.load(z_ptr + index, mask=inside, other=0.0)
    positive = z >= 0
    packed = tl.sum(tl.where(positive, 1, 0) << (7 - place)[None, :], axis=1)
    tl.store(z_ptr + index, z - tl.where(positive, scale, -scale), mask=inside)
    tl.store(bits_ptr + byte, packed.to(tl.uint8), mask=byte < count)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - kernels take their arguments by position
    bits_ptr, out_ptr, count, scale, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, 8)
    index = byte[:, None] * 8 + place[None, :]
    inside = (byte < count)[:, None] & (place < 8)[None, :]
    packed = tl.load(bits_ptr + byte, mask=byte < count, other=0).to(tl.int32)
    positive = ((packed[:, None] >> (7 - place)[None, :]) & 1) != 0
    value = tl.where(positive, scale, -scale)
    if ADD:
        value = tl.load(out_ptr + index, mask=inside, other=0.0) + value
    tl.store(out_ptr + index, value, mask=inside)


def sign_encode_triton_(z: Tensor, bits: Tensor, scale: float) -> None:
    """As `sign_encode_`."""
    count = bits.numel()
    if count:
        rounded = float(torch.tensor(scale, dtype=torch.float32))
        _encode[(triton.cdiv(count, _BLOCK),)](z, bits, count, rounded, BLOCK=_BLOCK)


def sign_decode_triton(bits: Tensor, out: Tensor, scale: float, accumulate: bool) -> None:
    """As `sign_decode`."""
    count = bits.numel()
    if count:
        rounded = float(torch.tensor(scale, dtype=torch.float32))
        _decode[(triton.cdiv(count, _BLOCK),)](bits, out, count, rounded, ADD=accumulate, BLOCK=_BLOCK)
