"""An encoder shaped as BERT: post-norm blocks, learnt positions, biases, dropout, and masked tokens to predict.

    model = Bert(BertConfig(vocab_size=257, context=128, num_layers=2, width=64, num_heads=4, inner_width=256))
    loss = model(tokens, targets)          # targets: -100 where a token is not to be predicted

(Devlin et al. 2019, arXiv:1810.04805, section 3.)
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trilithon.errors import ConfigError
from trilithon.models.layers import AttentionCore, Embedding, Linear
from trilithon.models.settings import BertConfig
from trilithon.parallel import Dropout, TokenLoss
from trilithon.parallel.sequence import CutTokens, HeadExchange

# B batch, T tokens, D width of the residual stream, E channels of one head, V vocabulary


class BertAttention(nn.Module):
    """Self-attention in both directions."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_heads, self.head_width = config.num_heads, config.head_width
        self.query = Linear(config.width, config.width, config.init_std, bias=True)
        self.key = Linear(config.width, config.width, config.init_std, bias=True)
        self.value = Linear(config.width, config.width, config.init_std, bias=True)
        self.out = Linear(config.width, config.width, config.init_std, bias=True)
        self.attend = HeadExchange(AttentionCore(causal=False, dropout=config.dropout))

    def forward(self, x_BTD: Tensor, keep_BT: Tensor | None) -> Tensor:
        products = (self.query, self.key, self.value)
        heads = [product(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for product in products]
        out: Tensor = self.out(self.attend(*heads, keep_BT).transpose(1, 2).flatten(2))
        return out


class BertBlock(nn.Module):
    """Attention and MLP; the norm follows each sum with the residual stream."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.up = Linear(config.width, config.inner_width, config.init_std, bias=True)
        self.down = Linear(config.inner_width, config.width, config.init_std, bias=True)
        self.mlp_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, keep_BT: Tensor | None) -> Tensor:
        x_BTD = self.attention_norm(x_BTD + self.dropout(self.attention(x_BTD, keep_BT)))
        out: Tensor = self.mlp_norm(x_BTD + self.dropout(self.down(F.gelu(self.up(x_BTD)))))
        return out


class Bert(nn.Module):
    """The whole model; `config` says its shape. The output matrix is the token embedding's, with a bias of its own."""

    tp_plan: ClassVar[dict[str, str]] = {
        "embedding": "vocabulary",
        "positions": "tokens",
        "types": "tokens",
        "blocks.*.attention.query": "column",
        "blocks.*.attention.key": "column",
        "blocks.*.attention.value": "column",
        "blocks.*.attention.out": "row",
        "blocks.*.up": "column",
        "blocks.*.down": "row",
        "head": "logits",
    }

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width, config.init_std)
        self.positions = Embedding(config.context, config.width, config.init_std)
        self.types = Embedding(config.num_types, config.width, config.init_std)
        self.embedding_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.blocks = nn.ModuleList(BertBlock(config) for _ in range(config.num_layers))
        self.transform = Linear(config.width, config.width, config.init_std, bias=True)
        self.transform_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = Linear(config.width, config.vocab_size, config.init_std, bias=True)
        self.head.weight = self.embedding.weight
        self.cut, self.dropout, self.loss = CutTokens(), Dropout(config.dropout), TokenLoss()

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None, types_BT: Tensor | None = None,
        keep_BT: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits [B, T, V], or with targets their mean cross entropy [] in fp32 over those that are not -100.

        types_BT: the sentence of each token, 0 by default. keep_BT: False for padding, which nothing attends to.
        Raises ConfigError for sequences longer than the context.
        """
        if tokens_BT.shape[-1] > self.config.context:
            raise ConfigError(
                f"A sequence of {tokens_BT.shape[-1]} tokens is longer than the model's context of "
                f"{self.config.context}. Cut it, or build the model with a larger context."
            )
        places_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None, :]
        types_BT = torch.zeros_like(places_BT) if types_BT is None else types_BT
        x_BTD = self.embedding(self.cut(tokens_BT))
        x_BTD = x_BTD + self.positions(self.cut(places_BT)) + self.types(self.cut(types_BT))
        x_BTD = self.dropout(self.embedding_norm(x_BTD))
        for block in self.blocks:
            x_BTD = block(x_BTD, keep_BT)
        logits_BTV = self.head(self.transform_norm(F.gelu(self.transform(x_BTD))))
        out: Tensor = self.loss.whole(logits_BTV) if targets_BT is None else self.loss(logits_BTV, self.cut(targets_BT))
        return out
