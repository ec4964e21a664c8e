"""A decoder shaped as Llama: separate queries, keys and values, with heads of keys that several queries share.

model = Llama(LlamaConfig(vocab_size=257, context=128, num_layers=2, width=64, num_heads=4, num_kv_heads=2,
                          inner_width=176))
loss = model(tokens, targets)          # [] f32
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from trilithon.errors import ConfigError
from trilithon.models.layers import AttentionCore, Embedding, Linear
from trilithon.models.rotary import Rotary
from trilithon.models.settings import LlamaConfig
from trilithon.models.stages import decoder_layers
from trilithon.parallel import TokenLoss
from trilithon.parallel.pipeline import Layer
from trilithon.parallel.sequence import CutTokens, HeadExchange

# B batch, T tokens, D width of the residual stream, H heads, E channels of one head, V vocabulary


class LlamaAttention(nn.Module):
    """Causal self-attention (Ainslie et al. 2023, arXiv:2305.13245, section 2)."""

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_width = config.num_heads, config.num_kv_heads, config.head_width
        key_width = config.num_kv_heads * config.head_width
        self.q = Linear(config.width, config.width, config.init_std)
        self.k = Linear(config.width, key_width, config.init_std)
        self.v = Linear(config.width, key_width, config.init_std)
        self.out = Linear(config.width, config.width, config.init_std)
        self.attend = HeadExchange(AttentionCore(causal=True, rotary=rotary))

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = [
            product(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for product in (self.q, self.k, self.v)
        ]
        out: Tensor = self.out(self.attend(*heads).transpose(1, 2).flatten(2))
        return out


class LlamaMLP(nn.Module):
    """A gate through SiLU times a linear path (Shazeer 2020, arXiv:2002.05202, equation 6)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.inner_width, config.init_std)
        self.up = Linear(config.width, config.inner_width, config.init_std)
        self.down = Linear(config.inner_width, config.width, config.init_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out


class LlamaBlock(nn.Module):
    """Attention and MLP, each reading a norm of the residual stream and adding to it."""

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = LlamaAttention(config, rotary)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        out: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return out


class Llama(nn.Module):
    """The whole model; `config` says its shape. Cut over tensor and sequence ranks it computes the same."""

    tp_plan: ClassVar[dict[str, str]] = {
        "embedding": "vocabulary",
        "blocks.*.attention.[qkv]": "column",
        "blocks.*.attention.out": "row",
        "blocks.*.mlp.gate": "column",
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
        "head": "logits",
    }

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        rotary = Rotary(config.head_width, config.context, config.rotary_base)
        self.embedding = Embedding(config.vocab_size, config.width, config.init_std)
        self.blocks = nn.ModuleList(LlamaBlock(config, rotary) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = Linear(config.width, config.vocab_size, config.init_std)
        self.cut, self.loss = CutTokens(), TokenLoss()
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def pipeline_layers(self) -> list[Layer]:
        """The token embedding, the blocks, and the output matrix with the norm before it."""
        return decoder_layers(self, self._embed, self._predict)

    def pipeline_loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """output: logits [B, T, V]; labels: [B, T] i64."""
        out: Tensor = self.loss(output, self.cut(labels))
        return out

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        if tokens_BT.shape[-1] > self.config.context:
            raise ConfigError(
                f"A sequence of {tokens_BT.shape[-1]} tokens is longer than the model's context of "
                f"{self.config.context}. Cut it, or build the model with a larger context."
            )
        out: Tensor = self.embedding(self.cut(tokens_BT))
        return out

    def _predict(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x_BTD))
        return out

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V], or with targets their mean cross entropy [] in fp32 (nats per token).

        tokens_BT, targets_BT: [B, T] i64 with T up to the context. Raises ConfigError for longer sequences.
        """
        x_BTD = self._embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self._predict(x_BTD)
        out: Tensor = self.loss.whole(logits_BTV) if targets_BT is None else self.loss(logits_BTV, self.cut(targets_BT))
        return out
