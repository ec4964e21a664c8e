"""What the models share: products and embeddings with a given spread of initial weights, and the core of attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trilithon.models.rotary import Rotary
from trilithon.parallel import Dropout

# B batch, H heads, T tokens, E channels of one head


class Linear(nn.Linear):
    """A product, initialised with a given standard deviation; without bias unless asked for."""

    def __init__(self, in_features: int, out_features: int, std: float, *, bias: bool = False) -> None:
        self._std = std  # read by reset_parameters, which the parent's constructor calls
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self._std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """Token vectors, initialised with a given standard deviation."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self._std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self._std)


class AttentionCore(nn.Module):
    """softmax(Q K^T / sqrt(E)) V, through SDPA unless weights are dropped (Vaswani et al. 2017, section 3.2.1).

    Keys and values may have fewer heads than queries, each then serving as many neighbouring ones.
    """

    def __init__(self, *, causal: bool, dropout: float = 0.0, rotary: Rotary | None = None) -> None:
        super().__init__()
        self.causal, self.rotary = causal, rotary
        self.dropout = Dropout(dropout, ("batch", "heads", "queries", "keys"))

    def forward(
        self, query_BHTE: Tensor, key_BHTE: Tensor, value_BHTE: Tensor, keep_BT: Tensor | None = None
    ) -> Tensor:
        """[B, H, T, E] each -> [B, H, T, E]. keep_BT: True where a token may be attended to; None for everywhere."""
        if self.rotary is not None:
            query_BHTE, key_BHTE = self.rotary(query_BHTE), self.rotary(key_BHTE)
        shared = query_BHTE.shape[1] // key_BHTE.shape[1]
        if shared > 1:
            key_BHTE, value_BHTE = (x.repeat_interleave(shared, dim=1) for x in (key_BHTE, value_BHTE))
        mask = None if keep_BT is None else keep_BT[:, None, None, :]
        if not self.training or self.dropout.p == 0.0:
            return F.scaled_dot_product_attention(
                query_BHTE, key_BHTE, value_BHTE, attn_mask=mask, is_causal=self.causal and mask is None
            )
        scores_BHTT = query_BHTE @ key_BHTE.transpose(-1, -2) / math.sqrt(query_BHTE.shape[-1])
        if self.causal:
            num_tokens = scores_BHTT.shape[-1]
            later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=scores_BHTT.device).triu(1)
            scores_BHTT = scores_BHTT.masked_fill(later, -math.inf)
        if mask is not None:
            scores_BHTT = scores_BHTT.masked_fill(~mask, -math.inf)
        out: Tensor = self.dropout(scores_BHTT.softmax(dim=-1)) @ value_BHTE
        return out
