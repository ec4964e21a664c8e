"""A decoder-only transformer: pre-norm blocks, causal attention through SDPA, rotary positions.

    model = GPT(preset("tiny", vocab_size=257))
    loss = model(tokens, targets)          # [] f32
    logits = model(tokens)                 # [B, T, V]

Every parameter is initialised where it is made, so the model can be built under `trilithon.zero.init`, which shards
each module as soon as it exists. The only tensors besides parameters are the rotary tables, which are not saved.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trilithon.errors import ConfigError
from trilithon.models.rotary import Rotary
from trilithon.models.settings import GPTConfig
from trilithon.parallel.moe import ConvertedBlock, MoE

# B batch, T tokens, D width of the residual stream, H heads, E channels of one head, V vocabulary


class _Linear(nn.Linear):
    """A product without bias, initialised with a given standard deviation."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        self._std = std  # read by reset_parameters, which the parent's constructor calls
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self._std)


class _Embedding(nn.Embedding):
    """Token vectors, initialised with a given standard deviation."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self._std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self._std)


class Attention(nn.Module):
    """Causal self-attention (Vaswani et al. 2017, arXiv:1706.03762, section 3.2)."""

    def __init__(self, config: GPTConfig, rotary: Rotary) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = _Linear(config.width, 3 * config.width, config.init_std)
        self.out = _Linear(config.width, config.width, _residual_std(config))
        self.rotary = rotary  # one table, shared by all blocks

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, num_tokens, width = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, num_tokens, 3, self.num_heads, width // self.num_heads)
        query_BHTE, key_BHTE, value_BHTE = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHTE = F.scaled_dot_product_attention(
            self.rotary(query_BHTE), self.rotary(key_BHTE), value_BHTE, is_causal=True
        )
        out: Tensor = self.out(mixed_BHTE.transpose(1, 2).reshape(batch, num_tokens, width))
        return out


class GeluMLP(nn.Module):
    """Two products with GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = _Linear(config.width, config.inner_width, config.init_std)
        self.down = _Linear(config.inner_width, config.width, _residual_std(config))

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x_BTD)))
        return out


class SwigluMLP(nn.Module):
    """A gate through SiLU times a linear path (Shazeer 2020, arXiv:2002.05202, equation 6)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = _Linear(config.width, config.inner_width, config.init_std)
        self.up = _Linear(config.width, config.inner_width, config.init_std)
        self.down = _Linear(config.inner_width, config.width, _residual_std(config))

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out


class Block(nn.Module):
    """Attention and MLP, each reading a norm of the residual stream and adding to it."""

    def __init__(self, config: GPTConfig, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config, rotary)
        self.mlp_norm = _norm(config)
        self.mlp = GeluMLP(config) if config.activation == "gelu" else SwigluMLP(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        out: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return out


class GPT(nn.Module):
    """The whole model; `config` says its shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        rotary = Rotary(config.head_width, config.context, config.rotary_base)
        self.embedding = _Embedding(config.vocab_size, config.width, config.init_std)
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.num_layers))
        for index in config.sparse_layers():
            self.blocks[index].mlp = _experts(self.blocks[index].mlp, config)
        self.norm = _norm(config)
        self.head = _Linear(config.width, config.vocab_size, config.init_std)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V], or with targets their mean cross entropy [] in fp32 (nats per token).

        tokens_BT, targets_BT: [B, T] i64 with T up to the context. Raises ConfigError for longer sequences.
        """
        if tokens_BT.shape[-1] > self.config.context:
            raise ConfigError(
                f"A sequence of {tokens_BT.shape[-1]} tokens is longer than the model's context of "
                f"{self.config.context}. Cut it, or build the model with a larger context."
            )
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        if targets_BT is None:
            return logits_BTV
        # In fp32: the log of a sum over thousands of bf16 exponentials has an error of the size of late progress.
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens_BT: Tensor,
        num_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue each row by `num_tokens`: [B, T] i64 -> [B, T + num_tokens] i64.

        temperature: 0 takes the likeliest token; otherwise logits are divided by it. top_k: draw among the k likeliest.
        generator: source of chance, on the device of the tokens.
        The number of forward passes is fixed and each goes through `__call__`, so under ZeRO stage 3 every rank calls
        this at the same time; with equal tokens and equal generators the ranks draw equal tokens.
        """
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ConfigError(f"temperature={temperature}, top_k={top_k}: give temperature >= 0 and top_k >= 1.")
        for _ in range(num_tokens):
            logits_BV = self(tokens_BT[:, -self.config.context :])[:, -1].float()
            tokens_BT = torch.cat((tokens_BT, _draw(logits_BV, temperature, top_k, generator)), dim=1)
        return tokens_BT


def _draw(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row: [B, 1] i64."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        kth_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -math.inf)
    return torch.multinomial((logits_BV / temperature).softmax(dim=-1), num_samples=1, generator=generator)


def _experts(mlp: nn.Module | Tensor, config: GPTConfig) -> nn.Module:
    """Experts like `mlp`, each with initial values of its own, in its place."""
    assert isinstance(mlp, nn.Module)
    moe = MoE(
        config.width,
        mlp,
        config.experts,
        config.ep_size,
        config.top_k,
        capacity_factor=config.capacity_factor or 1.0,
        drop_tokens=config.capacity_factor is not None,
        top2_2nd_expert_sampling=False,
    )
    return ConvertedBlock(moe, config.balance_coeff)


def _norm(config: GPTConfig) -> nn.Module:
    return nn.RMSNorm(config.width, eps=1e-5) if config.norm == "rms" else nn.LayerNorm(config.width)


def _residual_std(config: GPTConfig) -> float:
    """The residual stream adds up 2 x layers terms; each is scaled to keep the variance (Radford et al. 2019, 2.3)."""
    return config.init_std / math.sqrt(2 * config.num_layers)
