"""What every system trains: a plain GPT from a fixed seed, and a stream of tokens that can be learned.

The model is torch alone, so that no system pays for the import of another. Initial values are set where each module is
made, because some systems cut a module's parameters as soon as its constructor returns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from side_by_side.shape import Shape

# B batch, T tokens, D width, H heads, E channels of one head

ALPHABET = 97  # tokens that a stream visits apart from noise: few enough to be seen often in a short run
NOISE = 0.1


class _Linear(nn.Linear):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """Causal attention and a GELU network, each on a normalised residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.before_attention, self.before_mlp = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.query_key_value = _Linear(shape.width, 3 * shape.width)
        self.mix = _Linear(shape.width, shape.width)
        self.widen = _Linear(shape.width, 4 * shape.width)
        self.narrow = _Linear(4 * shape.width, shape.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = self.query_key_value(self.before_attention(x_BTD)).chunk(3, dim=-1)
        q_BHTE, k_BHTE, v_BHTE = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in heads)
        seen_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        x_BTD = x_BTD + self.mix(seen_BHTE.transpose(1, 2).flatten(2))
        out: Tensor = x_BTD + self.narrow(F.gelu(self.widen(self.before_mlp(x_BTD))))
        return out


class GPT(nn.Module):
    """Forward takes tokens [B, T + 1] and gives the mean cross entropy of predicting each from those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = _Embedding(shape.vocab_size, shape.width)
        self.positions = _Embedding(shape.num_tokens, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = _Linear(shape.width, shape.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x_BTD = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=tokens.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build(shape: Shape) -> GPT:
    """The model in fp32 on the CPU; the same values in every process."""
    torch.manual_seed(20)
    return GPT(shape)


def batch(shape: Shape, rank: int, number: int) -> Tensor:
    """Tokens [B, T + 1] of one rank's micro-batch; the same for every system that asks with the same numbers.

    A row walks around a circle of `ALPHABET` tokens with a stride of its own; one token in ten is replaced by chance.
    """
    chance = torch.Generator().manual_seed(1_000_003 * rank + number)
    size = (shape.micro_batch, shape.num_tokens + 1)
    start = torch.randint(ALPHABET, (shape.micro_batch, 1), generator=chance)
    stride = torch.randint(1, 8, (shape.micro_batch, 1), generator=chance)
    walk = (start + stride * torch.arange(size[1])) % ALPHABET
    anything = torch.randint(shape.vocab_size, size, generator=chance)
    return torch.where(torch.rand(size, generator=chance) < NOISE, anything, walk)
