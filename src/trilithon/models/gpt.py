"""A decoder-only transformer: pre-norm blocks, causal attention through SDPA, rotary positions.

    model = GPT(preset("tiny", vocab_size=257))
    loss = model(tokens, targets)          # [] f32
    logits = model(tokens)                 # [B, T, V]

Every parameter is initialised where it is made, so the model can be built under `trilithon.zero.init`, which shards
each module as soon as it exists. The only tensors besides parameters are the rotary tables, which are not saved. Cut
over tensor and sequence ranks it computes the same, dropout included.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trilithon.errors import ConfigError
from trilithon.models.layers import AttentionCore, Embedding, Linear
from trilithon.models.rotary import Rotary
from trilithon.models.settings import GPTConfig
from trilithon.models.stages import decoder_layers
from trilithon.parallel import Dropout, TokenLoss
from trilithon.parallel.moe import ConvertedBlock, MoE
from trilithon.parallel.pipeline import Layer
from trilithon.parallel.sequence import CutTokens, HeadExchange

# B batch, T tokens, D width of the residual stream, H heads, E channels of one head, V vocabulary


class Attention(nn.Module):
    """Causal self-attention (Vaswani et al. 2017, arXiv:1706.03762, section 3.2)."""

    def __init__(self, config: GPTConfig, rotary: Rotary) -> None:
        super().__init__()
        self.num_heads, self.head_width = config.num_heads, config.head_width
        self.qkv = Linear(config.width, 3 * config.width, config.init_std)
        self.out = Linear(config.width, config.width, _residual_std(config))
        # one rotary table, shared by all blocks
        self.attend = HeadExchange(AttentionCore(causal=True, dropout=config.dropout, rotary=rotary))

    def forward(self, x_BTD: Tensor) -> Tensor:
        # as many heads, and of as many tokens, as the product gives: on a mesh that is a part of the heads
        qkv = self.qkv(x_BTD).unflatten(-1, (3, -1, self.head_width))
        query_BHTE, key_BHTE, value_BHTE = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHTE = self.attend(query_BHTE, key_BHTE, value_BHTE)
        out: Tensor = self.out(mixed_BHTE.transpose(1, 2).flatten(2))
        return out


class GeluMLP(nn.Module):
    """Two products with GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, config.inner_width, config.init_std)
        self.down = Linear(config.inner_width, config.width, _residual_std(config))

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x_BTD)))
        return out


class SwigluMLP(nn.Module):
    """A gate through SiLU times a linear path (Shazeer 2020, arXiv:2002.05202, equation 6)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.inner_width, config.init_std)
        self.up = Linear(config.width, config.inner_width, config.init_std)
        self.down = Linear(config.inner_width, config.width, _residual_std(config))

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
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        out: Tensor = x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))
        return out


class GPT(nn.Module):
    """The whole model; `config` says its shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        rotary = Rotary(config.head_width, config.context, config.rotary_base)
        self.embedding = Embedding(config.vocab_size, config.width, config.init_std)
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.num_layers))
        for index in config.sparse_layers():
            self.blocks[index].mlp = _experts(self.blocks[index].mlp, config)
        self.norm = _norm(config)
        self.head = Linear(config.width, config.vocab_size, config.init_std)
        self.cut, self.dropout, self.loss = CutTokens(), Dropout(config.dropout), TokenLoss()
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    @property
    def tp_plan(self) -> dict[str, str]:
        """Which layers are cut how over tensor ranks; experts are not."""
        plan = {
            "embedding": "vocabulary",
            "blocks.*.attention.qkv": "column:3",
            "blocks.*.attention.out": "row",
            "head": "logits",
        }
        columns = ("up",) if self.config.activation == "gelu" else ("gate", "up")
        for index in sorted(set(range(self.config.num_layers)) - set(self.config.sparse_layers())):
            plan.update({f"blocks.{index}.mlp.{name}": "column" for name in columns})
            plan[f"blocks.{index}.mlp.down"] = "row"
        return plan

    def pipeline_layers(self) -> list[Layer]:
        """The token embedding, the blocks, and the output matrix with the norm before it."""
        return decoder_layers(self, self._embed, self._predict)

    def pipeline_loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """output: logits [B, T, V]; labels: [B, T] i64."""
        out: Tensor = self.loss(output, self.cut(labels))
        return out

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        self._require_room(tokens_BT)
        out: Tensor = self.dropout(self.embedding(self.cut(tokens_BT)))
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

    def _require_room(self, tokens_BT: Tensor) -> None:
        if tokens_BT.shape[-1] > self.config.context:
            raise ConfigError(
                f"A sequence of {tokens_BT.shape[-1]} tokens is longer than the model's context of "
                f"{self.config.context}. Cut it, or build the model with a larger context."
            )

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
            seen_BT = tokens_BT[:, -self.config.context :]
            last, missing = seen_BT.shape[1] - 1, -seen_BT.shape[1] % self.cut.multiple
            logits_BV = self(F.pad(seen_BT, (0, missing)))[:, last].float()  # what follows a token cannot reach it
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
