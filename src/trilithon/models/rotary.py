"""Rotary positions: queries and keys are turned by an angle that grows with the position.

The product of a turned query and a turned key depends on their distance alone (Su et al. 2021, arXiv:2104.09864,
section 3.4.2). Channel i of the first half is paired with channel i of the second.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# B batch, H heads, T tokens, E channels of one head


class Rotary(nn.Module):
    """Cosines and sines of every position, in fp32 whatever the parameters are: bf16 angles are wrong beyond 256."""

    cos: Tensor  # [T, E] f32
    sin: Tensor  # [T, E] f32

    def __init__(self, head_width: int, context: int, base: float) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)  # [E/2]
        angles = torch.arange(context, dtype=torch.float64)[:, None] * frequencies[None, :]  # [T, E/2]
        # Not persistent: they follow from the configuration, and a checkpoint should not fix the context.
        self.register_buffer("cos", angles.cos().float().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().float().repeat(1, 2), persistent=False)

    def forward(self, x_BHTE: Tensor) -> Tensor:
        """Turn queries or keys [B, H, T, E] that start at position 0; the dtype stays."""
        num_tokens = x_BHTE.shape[-2]
        cos_TE = self.cos[:num_tokens].to(x_BHTE.dtype)
        sin_TE = self.sin[:num_tokens].to(x_BHTE.dtype)
        first, second = x_BHTE.chunk(2, dim=-1)
        return x_BHTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE
