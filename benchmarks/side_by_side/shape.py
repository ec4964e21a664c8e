"""Sizes of the model that every system trains. Without torch, so that a command line answers at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of one rank's micro-batch."""

    num_layers: int
    width: int
    num_heads: int
    micro_batch: int
    num_tokens: int
    vocab_size: int = 8192

    def num_parameters(self) -> int:
        """Counted by hand, without building the model."""
        block = 12 * self.width**2 + 4 * self.width
        return self.num_layers * block + (2 * self.vocab_size + self.num_tokens + 2) * self.width


SIZES = {
    "tiny": Shape(num_layers=2, width=64, num_heads=2, micro_batch=2, num_tokens=64),
    "10m": Shape(num_layers=8, width=256, num_heads=4, micro_batch=2, num_tokens=256),
    "50m": Shape(num_layers=13, width=512, num_heads=8, micro_batch=1, num_tokens=256),
}
