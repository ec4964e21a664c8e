"""The language models of DeepSpeed-MoE: dense, with experts, with residual experts in a pyramid, and their students.

    config = PrMoEConfig.named("350M+PR-MoE-32/64")
    print(config.num_parameters())                      # 4.1 billion
    model = PrMoE(config)
    student = PrMoE(config.student(num_layers=21))      # a Mixture of Students

A decoder with learned positions, biases and a tied head; every second layer has experts, top-1. In a pyramid deeper
layers have more experts; a residual layer adds a dense block to them.
(Rajbhandari et al. 2022, arXiv:2201.05596, sections 3 and 4; sizes: table 1 and 3.)
"""

# B batch, T tokens, D width

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trilithon.config.base import Flag, NonNegativeReal, Positive, Section
from trilithon.errors import ConfigError
from trilithon.parallel.moe import ConvertedBlock, FeedForward, MoE


class PrMoEConfig(Section):
    """The shape of one model. experts: one number for each layer that has experts, from the first to the last."""

    num_layers: Positive
    """Blocks."""
    width: Positive
    """Channels of the residual stream."""
    num_heads: Positive
    """Attention heads."""
    experts: tuple[Positive, ...] = ()
    """Experts of the layers 2, 4, 6, ...; empty: a dense model."""
    residual: Flag = False
    """A dense block beside the experts of a layer, mixed by two learned coefficients."""
    vocab_size: Positive = 50257
    """Tokens."""
    context: Positive = 2048
    """Longest sequence."""
    ep_size: Positive | None = None
    """Ranks over which experts are spread. null: in each layer as many as fit."""
    balance_coeff: NonNegativeReal = 0.01
    """Weight of the balance loss."""

    def num_parameters(self) -> int:
        """All parameters, the tied head once."""
        width, block = self.width, 8 * self.width**2 + 5 * self.width
        dense = (self.vocab_size + self.context) * width + self.num_layers * (12 * width**2 + 13 * width) + 2 * width
        extra = sum(number * (block + width) for number in self.experts)
        return dense + extra + len(self.experts) * (2 * width + 2 if self.residual else -block)

    def student(self, num_layers: int) -> PrMoEConfig:
        """A model of the same family with fewer layers; the first entries of the pyramid are left out.

        Raises ConfigError if nothing would be left out or everything.
        """
        if not 1 < num_layers < self.num_layers:
            raise ConfigError(f"a student of {self.num_layers} layers has between 2 and that; got {num_layers}.")
        sparse = num_layers // 2 if self.experts else 0
        return PrMoEConfig(**{**self.model_dump(), "num_layers": num_layers, "experts": self.experts[-sparse:]})

    @staticmethod
    def named(name: str, **changes: Any) -> PrMoEConfig:
        """One of `MODELS`. Raises ConfigError for another name."""
        if name not in MODELS:
            raise ConfigError(f"model {name!r} does not exist; there are {', '.join(MODELS)}.")
        return PrMoEConfig(**{**MODELS[name].model_dump(), **changes})


def _model(layers: int, width: int, heads: int, experts: tuple[int, ...] = (), residual: bool = False) -> PrMoEConfig:
    return PrMoEConfig(num_layers=layers, width=width, num_heads=heads, experts=experts, residual=residual)


MODELS: dict[str, PrMoEConfig] = {
    "350M": _model(24, 1024, 16),
    "1.3B": _model(24, 2048, 16),
    "6.7B": _model(32, 4096, 32),
    "350M+MoE-128": _model(24, 1024, 16, (128,) * 12),
    "1.3B+MoE-128": _model(24, 2048, 16, (128,) * 12),
    "350M+PR-MoE-32/64": _model(24, 1024, 16, (32,) * 10 + (64,) * 2, True),
    "1.3B+PR-MoE-64/128": _model(24, 2048, 16, (64,) * 10 + (128,) * 2, True),
    "350M+PR-MoE+MoS": _model(21, 1024, 16, (32,) * 8 + (64,) * 2, True),
    "1.3B+PR-MoE+MoS": _model(21, 2048, 16, (64,) * 8 + (128,) * 2, True),
    "2.4B+MoE-128": _model(16, 3584, 28, (128,) * 8),
    "8B+MoE-128": _model(40, 4096, 32, (128,) * 20),
    "24B+MoE-128": _model(30, 8192, 64, (128,) * 15),
    "47B+MoE-128": _model(58, 8192, 64, (128,) * 29),
}


class _Block(nn.Module):
    def __init__(self, config: PrMoEConfig, num_experts: int | None) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp: nn.Module = FeedForward(width, 4 * width)
        if num_experts is not None:
            moe = MoE(width, self.mlp, num_experts, config.ep_size, use_residual=config.residual)
            self.mlp = ConvertedBlock(moe, config.balance_coeff)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, num_tokens, width = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(batch, num_tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, num_tokens, width))
        out: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return out


class PrMoE(nn.Module):
    """tokens [B, T] -> logits [B, T, V], or with targets their mean cross entropy [] in fp32."""

    def __init__(self, config: PrMoEConfig) -> None:
        super().__init__()
        if len(config.experts) not in (0, config.num_layers // 2):
            raise ConfigError(
                f"{config.num_layers} layers have experts in {config.num_layers // 2} of them, and the pyramid names "
                f"{len(config.experts)} numbers."
            )
        if config.width % config.num_heads:
            raise ConfigError(f"width={config.width} does not split into num_heads={config.num_heads}.")
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        numbers = [config.experts[i // 2] if i % 2 and config.experts else None for i in range(config.num_layers)]
        self.blocks = nn.ModuleList(_Block(config, number) for number in numbers)
        self.norm = nn.LayerNorm(config.width)
        for table in (self.tokens, self.positions):
            if not table.weight.is_meta:
                nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions(places)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = F.linear(self.norm(x_BTD), self.tokens.weight)
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())
