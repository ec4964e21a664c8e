"""The shapes of models, without torch: sizes, presets, parameters and arithmetic per token."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trilithon.config.base import Count, Decay, Flag, NonNegativeReal, Positive, PositiveReal, Section
from trilithon.errors import ConfigError

_SWIGLU_MULTIPLE = 32  # the inner width of SwiGLU is rounded up to this, so that kernels and shards divide it


class GPTConfig(Section):
    """A decoder-only transformer (Radford et al. 2019; pre-norm blocks, rotary positions)."""

    vocab_size: Positive
    """Tokens it reads and predicts."""
    context: Positive
    """Longest sequence in tokens."""
    num_layers: Positive
    """Blocks of attention and MLP."""
    width: Positive
    """Channels of the residual stream."""
    num_heads: Positive
    """Attention heads; each has width / num_heads channels, an even number."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) or LayerNorm (Ba et al. 2016, arXiv:1607.06450)."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """GELU with an inner width of 4 x width, or SwiGLU (Shazeer 2020, arXiv:2002.05202) with about 8/3 x width."""
    tie_embeddings: Flag = True
    """Read tokens and predict them with the same matrix (Press and Wolf 2017, arXiv:1608.05859)."""
    experts: Count = 0
    """Feed-forward blocks to choose from in layers that have experts. 0: every layer has one block (dense)."""
    top_k: Positive = 1
    """Experts that each token goes to."""
    expert_every: Positive = 2
    """Every this many layers has experts, the last one among them."""
    ep_size: Positive | None = None
    """Ranks over which the experts of a layer are spread. null: as many as fit."""
    capacity_factor: PositiveReal | None = 1.25
    """Room of an expert in training, over what it would get at uniform load. null: nothing is ever dropped."""
    balance_coeff: NonNegativeReal = 0.01
    """Weight of the loss that keeps experts evenly loaded."""
    dropout: Decay = 0.0
    """Share of embeddings, attention weights and residual terms that is zeroed in training."""
    rotary_base: PositiveReal = 10_000.0
    """Base of the wavelengths of rotary positions (Su et al. 2021, arXiv:2104.09864, section 3.2.2)."""
    init_std: Annotated[PositiveReal, Field(le=1)] = 0.02
    """Standard deviation of initial weights; those that write to the residual stream get it over sqrt(2 x layers)."""

    @model_validator(mode="after")
    def _heads_divide(self) -> GPTConfig:
        if self.width % (2 * self.num_heads):
            unit = 2 * self.num_heads
            below = self.width // unit * unit
            nearest = f"{below} and {below + unit}" if below else f"{unit}"
            raise ValueError(
                f"width={self.width} does not split into num_heads={self.num_heads} heads of an even number of "
                f"channels; nearest widths that do: {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _experts_fit(self) -> GPTConfig:
        if self.experts and self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} experts per token of experts={self.experts}; top_k goes up to that")
        if self.experts and self.ep_size and self.experts % self.ep_size:
            raise ValueError(f"experts={self.experts} do not split over ep_size={self.ep_size} ranks; give a divisor")
        return self

    def sparse_layers(self) -> range:
        """Indices of the layers with experts."""
        first = (self.num_layers - 1) % self.expert_every
        return range(first, self.num_layers, self.expert_every) if self.experts else range(0)

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def inner_width(self) -> int:
        """Channels inside an MLP."""
        if self.activation == "gelu":
            return 4 * self.width
        return -(-8 * self.width // (3 * _SWIGLU_MULTIPLE)) * _SWIGLU_MULTIPLE

    def matrix_parameters(self) -> int:
        """Parameters that take part in a matrix product for every token, the output matrix included. Of experts, those
        that one token goes to, and the router."""
        mlp = self._mlp_parameters()
        sparse = len(self.sparse_layers()) * ((self.top_k - 1) * mlp + self.experts * self.width)
        return self.num_layers * (4 * self.width**2 + mlp) + sparse + self.vocab_size * self.width

    def _mlp_parameters(self) -> int:
        return (2 if self.activation == "gelu" else 3) * self.width * self.inner_width

    def num_parameters(self) -> int:
        """All parameters, tied ones once."""
        per_norm = self.width * (1 if self.norm == "rms" else 2)
        norms = (2 * self.num_layers + 1) * per_norm
        separate_embedding = 0 if self.tie_embeddings else self.vocab_size * self.width
        idle = len(self.sparse_layers()) * (self.experts - self.top_k) * self._mlp_parameters()
        return self.matrix_parameters() + idle + norms + separate_embedding

    def training_flops_per_token(self, context: int | None = None) -> int:
        """Floating-point operations of forward and backward for one token of sequences of `context` tokens.

        A multiply-add counts two; backward costs twice forward; a causal token attends to half the context on average.
        Counted as in Kaplan et al. 2020 (arXiv:2001.08361, section 2.1), with the output matrix and the causal half.
        """
        context = self.context if context is None else context
        matrices = 2 * self.matrix_parameters()
        attention = self.num_layers * 2 * (2 * self.width) * context // 2  # scores and weighted sum of values
        return 3 * (matrices + attention)


class LlamaConfig(Section):
    """The shape of Llama: RMSNorm, SwiGLU, rotary positions, fewer heads of keys and values than of queries.

    Touvron et al. 2023, arXiv:2302.13971, section 2.2; shared heads: Ainslie et al. 2023, arXiv:2305.13245, section 2.
    """

    vocab_size: Positive
    """Tokens it reads and predicts."""
    context: Positive
    """Longest sequence in tokens."""
    num_layers: Positive
    """Blocks of attention and MLP."""
    width: Positive
    """Channels of the residual stream."""
    num_heads: Positive
    """Heads of queries; each has width / num_heads channels, an even number."""
    num_kv_heads: Positive
    """Heads of keys and values; divides num_heads."""
    inner_width: Positive
    """Channels inside an MLP."""
    tie_embeddings: Flag = False
    """Read tokens and predict them with the same matrix."""
    rotary_base: PositiveReal = 10_000.0
    """Base of the wavelengths of rotary positions."""
    norm_eps: PositiveReal = 1e-5
    """Added to the mean square inside RMSNorm."""
    init_std: Annotated[PositiveReal, Field(le=1)] = 0.02
    """Standard deviation of initial weights."""

    @model_validator(mode="after")
    def _heads_divide(self) -> LlamaConfig:
        if self.width % (2 * self.num_heads) or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"width={self.width}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: heads need an even "
                "number of channels each, and as many queries for every head of keys"
            )
        return self

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads


class BertConfig(Section):
    """The shape of BERT: an encoder that predicts masked tokens (Devlin et al. 2019, arXiv:1810.04805, section 3)."""

    vocab_size: Positive
    """Tokens it reads and predicts."""
    context: Positive
    """Longest sequence in tokens; each position has a vector."""
    num_layers: Positive
    """Blocks of attention and MLP."""
    width: Positive
    """Channels of the residual stream."""
    num_heads: Positive
    """Attention heads; divides width."""
    inner_width: Positive
    """Channels inside an MLP."""
    num_types: Positive = 2
    """Kinds of sentences, each with a vector."""
    dropout: Decay = 0.1
    """Share of embeddings, attention weights and residual terms that is zeroed in training."""
    norm_eps: PositiveReal = 1e-12
    """Added to the variance inside LayerNorm."""
    init_std: Annotated[PositiveReal, Field(le=1)] = 0.02
    """Standard deviation of initial weights."""

    @model_validator(mode="after")
    def _heads_divide(self) -> BertConfig:
        if self.width % self.num_heads:
            raise ValueError(f"width={self.width} does not split into num_heads={self.num_heads} heads")
        return self

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads


# layers, width, heads, context
_PRESETS: dict[str, tuple[int, int, int, int]] = {
    "nano": (2, 64, 2, 64),
    "tiny": (4, 128, 4, 128),
    "small": (6, 256, 4, 256),
    "medium": (8, 512, 8, 512),
    "base": (12, 768, 12, 1024),
    "large": (24, 1024, 16, 1024),
    "xl": (24, 2048, 16, 2048),
}

PRESETS = tuple(_PRESETS)


def preset(name: str, vocab_size: int, **changes: Any) -> GPTConfig:
    """A named shape; `changes` are fields of GPTConfig that replace its own.

    Raises ConfigError for a name that is none of `PRESETS`, or changes that do not fit.
    """
    if name not in _PRESETS:
        raise ConfigError(f"model preset {name!r} does not exist. Choose one of {', '.join(PRESETS)}.")
    num_layers, width, num_heads, context = _PRESETS[name]
    shape = {"num_layers": num_layers, "width": width, "num_heads": num_heads, "context": context}
    return GPTConfig(**{"vocab_size": vocab_size, **shape, **changes})
