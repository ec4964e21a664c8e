"""A few bits per element between the smallest and the largest value of a block, evenly spaced.

code = round((z - low) / step), step = (high - low) / (2^bits - 1), so an element is off by at most half a step. One
outlier widens the steps of its whole block, which is what small blocks are for. (The uniform compressor of Tang et al.
2020, "APMSqueeze", arXiv:2008.11343; blocks as in Dettmers et al. 2022, arXiv:2110.02861, section 2.1.)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trilithon.comm.compressor import Rows, read_floats, write_floats

_RANGE_BYTES = 8  # low and step, f32 each


class Blockwise:
    """bits: 2, 4 or 8. block: elements that share a range; 0: the whole row does (uniform)."""

    name = "quant"

    def __init__(self, bits: Literal[2, 4, 8] = 8, block: int = 0) -> None:
        self._bits, self._block = bits, block

    def nbytes(self, numel: int) -> int:
        return numel * self._bits // 8 + _RANGE_BYTES * self._blocks(numel)

    def encode_(self, z: Tensor, payload: Tensor, rows: Rows) -> None:
        for row, code, real in zip(z, payload, rows.real, strict=True):
            numel = row.numel()
            blocks = self._blocked(row, real)
            low, step = _ranges(blocks, 2**self._bits - 1)
            codes = ((blocks - low) / step).round_().clamp_(0, 2**self._bits - 1).to(torch.uint8)
            row.sub_(_values(codes, low, step).view(-1)[:numel])
            row[real:].zero_()
            at = numel * self._bits // 8
            code[:at].copy_(self._pack(codes.view(-1)[:numel]))
            write_floats(code[at:], torch.cat([low, step], 1).view(-1))

    def decode(self, payload: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        numel = out.numel()
        at = numel * self._bits // 8
        codes = torch.zeros(self._blocks(numel) * self._size(numel), dtype=torch.uint8, device=out.device)
        codes[:numel] = self._unpack(payload[:at])
        ranges = read_floats(payload[at:]).view(-1, 2)
        values = _values(codes.view(-1, self._size(numel)), ranges[:, :1], ranges[:, 1:]).view(-1)[:numel]
        out.add_(values) if accumulate else out.copy_(values)

    def _size(self, numel: int) -> int:
        return self._block or max(numel, 1)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self._size(numel))

    def _blocked(self, row: Tensor, real: int) -> Tensor:
        """[blocks, size]; behind the real elements stands the last of them, which widens no range."""
        size = self._size(row.numel())
        flat = row.new_zeros(self._blocks(row.numel()) * size)
        flat[: row.numel()] = row
        if real:
            flat[real:] = row[real - 1]
        return flat.view(-1, size)

    def _pack(self, codes: Tensor) -> Tensor:
        per_byte = 8 // self._bits
        if per_byte == 1:
            return codes
        weights = torch.tensor([2 ** (self._bits * k) for k in reversed(range(per_byte))], device=codes.device)
        return (codes.view(-1, per_byte) * weights.to(torch.uint8)).sum(1, dtype=torch.uint8)

    def _unpack(self, packed: Tensor) -> Tensor:
        per_byte = 8 // self._bits
        if per_byte == 1:
            return packed
        shifts = [self._bits * k for k in reversed(range(per_byte))]
        return torch.stack([(packed >> shift) & (2**self._bits - 1) for shift in shifts], 1).view(-1)


def _ranges(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """low, step: [blocks, 1] f32 each; where all values are equal the step is 1, and every code 0."""
    low, high = blocks.min(1, keepdim=True).values, blocks.max(1, keepdim=True).values
    step = ((high.double() - low.double()) / levels).float()
    return low, torch.where(step == 0, torch.ones_like(step), step)


def _values(codes: Tensor, low: Tensor, step: Tensor) -> Tensor:
    return codes.float().mul_(step).add_(low)
