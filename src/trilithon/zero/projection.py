"""The norm of a mean that nobody computes: every rank projects its own part onto a few random directions.

With signs s drawn alike on all ranks, the expected square of s . g is |g|^2, and s . mean(g_i) = mean(s . g_i). So the
squares of the mean over ranks of `LENGTH` such products, each over elements of its own, add up to the squared norm of
the mean gradient: without bias, and with a standard deviation of at most sqrt(2) of it, if all of it is in one product,
and sqrt(2 / LENGTH), 9 %, if it is spread evenly. (Alon, Matias, Szegedy 1999, "The space complexity of approximating
the frequency moments", section 2.2; buckets as in Charikar, Chen, Farach-Colton 2002, "Finding frequent items in data
streams", section 3.)
"""

from __future__ import annotations

import functools
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTH = 256  # numbers on the wire
_COLUMNS = 2048  # elements of one chunk that go into one product
_OFFSETS = 1 << 16


def projection(flat: Tensor, key: str, step: int) -> Tensor:
    """[LENGTH] f64, on the CPU: products of `flat` ([n], floating) with signs that depend on n, key and step only."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key}, step {step}".encode()))
    parts = flat.split(LENGTH * _COLUMNS)
    offsets = torch.randint(0, _OFFSETS, (len(parts),), generator=generator).tolist()
    turns = torch.randint(0, 2, (len(parts), LENGTH), generator=generator).mul_(2).sub_(1).to(flat.device)
    signs, total = _signs(flat.device), torch.zeros(LENGTH, dtype=torch.float64, device=flat.device)
    for part, offset, turn in zip(parts, offsets, turns, strict=True):
        columns = -(-part.numel() // LENGTH)
        table = F.pad(part.float(), (0, columns * LENGTH - part.numel())).view(LENGTH, columns)
        directions = signs[offset : offset + LENGTH * columns].view(LENGTH, columns)
        total += turn * (table * directions).sum(1)
    return total.cpu()


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """1 and -1, drawn once. Where a chunk begins to read them, and the sign of each row, is drawn every time."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 2, (LENGTH * _COLUMNS + _OFFSETS,), generator=generator, dtype=torch.int8)
    return drawn.mul_(2).sub_(1).to(device, torch.float32)
