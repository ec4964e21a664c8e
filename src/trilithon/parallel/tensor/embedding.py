"""An embedding whose rows (the vocabulary) are cut over tensor ranks.

Each rank looks up the tokens whose rows it holds, gives zeros for the others, and the sum over ranks is the embedding
(Shoeybi et al. 2019, arXiv:1909.08053, section 3). Exactly one term of each sum is not zero, so the result is exact.
"""

# B batch, T tokens, D model

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trilithon.contracts import Collectives, Tag
from trilithon.parallel import regions
from trilithon.parallel.slicing import ParameterSlice


class VocabularyEmbedding(nn.Embedding):
    """Holds rows [rows.start, rows.stop) of the table, then padding up to an equal number on each rank."""

    def __init__(
        self, layer: nn.Embedding, group: Collectives, name: str, cut: ParameterSlice, *, cut_tokens: bool = False
    ) -> None:
        nn.Module.__init__(self)
        self.weight = layer.weight
        self.num_embeddings, self.embedding_dim = cut.shape
        self.padding_idx, self.max_norm, self.norm_type = layer.padding_idx, None, layer.norm_type
        self.scale_grad_by_freq = self.sparse = False
        self.training = layer.training
        self.rows = range(*cut.ranges()[0])
        self._group, self._tag, self._cut_tokens = group, Tag(name), cut_tokens

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """[B, T] whole numbers -> [B, T, D], with cut tokens [B, T/t, D]."""
        here = (tokens_BT >= self.rows.start) & (tokens_BT < self.rows.stop)
        local = (tokens_BT - self.rows.start).masked_fill(~here, 0)
        vectors_BTD = F.embedding(local, self.weight).masked_fill(~here[..., None], 0.0)
        if self.padding_idx is not None:  # its vector is read, and never learns
            fixed = tokens_BT == self.padding_idx
            vectors_BTD = vectors_BTD.detach().where(fixed[..., None], vectors_BTD)
        if self._cut_tokens:
            return regions.scatter_sum(vectors_BTD, -2, self._group, self._tag)
        return regions.sum_out(vectors_BTD, self._group, self._tag)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rows {self.rows.start} to {self.rows.stop}"
