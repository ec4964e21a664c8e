"""One bit per element: the signs of a tensor packed eight to a byte, and what is lost by keeping only them.

The layout is numpy's `packbits`: the first of eight elements is the most significant bit, 1 stands for z >= 0 (so both
zeros are positive). Encoding turns z into what the signs and the scale do not say, z - (+-scale), in the same pass;
decoding writes or adds +-scale. Each element sees one addition, so every implementation gives the same bits.
(Tang et al. 2021, "1-bit Adam", arXiv:2102.02888, section 4.)
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from trilithon.kernels.chunks import chunks
from trilithon.kernels.compiled import Array, array, compiled


def sign_encode_(z: Tensor, bits: Tensor, scale: float) -> None:
    """bits [n / 8] uint8 becomes the signs of z [n] f32, and z what they leave over; n is a multiple of 8."""
    if _by_triton():
        from trilithon.kernels.signs_triton import sign_encode_triton_

        sign_encode_triton_(z, bits, scale)
        return
    loop = compiled(sign_encode_loop, (z, bits), (scale,))
    if loop is None:
        sign_encode_torch_(z, bits, scale)
    else:
        loop(array(z), array(bits), scale)


def sign_decode(bits: Tensor, out: Tensor, scale: float, accumulate: bool = False) -> None:
    """out [n] f32 becomes, or with `accumulate` gains, +scale where the bit is set and -scale elsewhere."""
    if _by_triton():
        from trilithon.kernels.signs_triton import sign_decode_triton

        sign_decode_triton(bits, out, scale, accumulate)
        return
    loop = compiled(sign_decode_loop, (bits, out), (scale, accumulate))
    if loop is None:
        sign_decode_torch(bits, out, scale, accumulate)
    else:
        loop(array(bits), array(out), scale, accumulate)


def _by_triton() -> bool:
    return os.environ.get("TRILITHON_KERNELS") == "triton"


def sign_encode_loop(z: Array, bits: Array, scale: float) -> None:
    """One pass, for `compiled`."""
    for byte in range(bits.shape[0]):
        packed = np.uint8(0)
        for i in range(8 * byte, 8 * byte + 8):
            value = z[i]
            positive = value >= np.float32(0.0)
            packed = np.uint8((packed << np.uint8(1)) | np.uint8(positive))
            z[i] = value - (scale if positive else -scale)
        bits[byte] = packed


def sign_decode_loop(bits: Array, out: Array, scale: float, accumulate: bool) -> None:
    """One pass, for `compiled`."""
    for byte in range(bits.shape[0]):
        packed = np.uint32(bits[byte])
        for k in range(8):
            value = scale if (packed >> np.uint32(7 - k)) & np.uint32(1) else -scale
            out[8 * byte + k] = out[8 * byte + k] + value if accumulate else value


@torch.no_grad()
def sign_encode_torch_(z: Tensor, bits: Tensor, scale: float) -> None:
    """The plain torch twin, any device."""
    weights = _weights(z.device)
    for part in chunks(z):
        values = z[part]
        positive = values >= 0
        bits[part.start // 8 : part.stop // 8] = (positive.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
        values.sub_(torch.where(positive, scale, -scale))


@torch.no_grad()
def sign_decode_torch(bits: Tensor, out: Tensor, scale: float, accumulate: bool) -> None:
    """The plain torch twin, any device."""
    weights = _weights(bits.device)
    for part in chunks(out):
        packed = bits[part.start // 8 : part.stop // 8]
        positive = (packed.view(-1, 1) & weights).view(-1) != 0
        values = torch.where(positive, scale, -scale)
        out[part].add_(values) if accumulate else out[part].copy_(values)


def _weights(device: torch.device) -> Tensor:
    return torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=device)
