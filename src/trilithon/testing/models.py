"""Small models with the shapes that break distributed training: tied, frozen, unused and shared parameters.

Each model draws its weights from its own seed and leaves the global generators as they were, so that every rank and the
reference start alike. Weights are what the stock layers draw when they are built, nothing is overwritten afterwards, so
the models can also be built sharded. Calling one with targets returns its loss, a mean in fp32.

Attention has no biases on purpose: the gradient of a key bias is zero in exact arithmetic, so an adaptive optimizer
would turn its rounding noise into full steps and no two summation orders would agree.
"""

# B batch, T tokens, D model, V vocabulary, H heads, K head size

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm attention and MLP, both with a residual. [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(B, T, 3, self.num_heads, D // self.num_heads)
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.attention_out(mixed_BHTK.transpose(1, 2).reshape(B, T, D))
        change_BTD: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x_BTD))))
        return x_BTD + change_BTD


class TinyGPT(nn.Module):
    """A decoder of `layers` blocks that predicts the next token.

    tied: the output head is the token embedding. frozen: positions and the first block do not train (a part of one unit
    and the whole of another). unused: a linear layer that no forward calls.
    """

    def __init__(
        self,
        *,
        vocab: int = 61,
        dim: int = 32,
        layers: int = 2,
        heads: int = 2,
        context: int = 16,
        tied: bool = True,
        frozen: bool = False,
        unused: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.vocab, self.dim, self.context = vocab, dim, context
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(vocab, dim)
            self.positions = nn.Embedding(context, dim)
            self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, vocab, bias=False)
            if unused:
                self.unused = nn.Linear(dim, dim)
        if tied:
            self.head.weight = self.tokens.weight
        if frozen:
            for part in (self.positions, self.blocks[0]):
                part.requires_grad_(False)

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """[B, T] int64 with T <= context -> [B, T, V]."""
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions(places)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        # the embedding has entries of size 1: scaled, a tied head gives logits of size 1 at the start
        logits_BTV: Tensor = self.head(self.norm(x_BTD)) * self.dim**-0.5
        return logits_BTV

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """[B, T] int64 with T <= context + 1: the mean loss [] f32 of predicting each token from those before it."""
        logits_BTV = self.logits(tokens_BT[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())


class MLP(nn.Module):
    """Linear layers with tanh between them. [B, width] -> [B, out], or the mean squared error against a target."""

    def __init__(self, *, width: int = 16, depth: int = 3, out: int = 4, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
            self.last = nn.Linear(width, out)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        output: Tensor = self.last(x)
        return output if target is None else F.mse_loss(output.float(), target.float())


class SharedLayerNet(nn.Module):
    """`shared` is used three times under two names, `never` is used by nobody. [B, width] -> [B, out] or a loss."""

    def __init__(self, *, width: int = 16, out: int = 4, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(width, width)
            self.shared = nn.Linear(width, width)
            self.never = nn.Linear(width, 3)
            self.last = nn.Linear(width, out)
        self.same = self.shared

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.first(x))))
        x = torch.tanh(self.same(x)) + self.shared(x)
        output: Tensor = self.last(x)
        return output if target is None else F.mse_loss(output.float(), target.float())
