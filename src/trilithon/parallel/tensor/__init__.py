"""Matrices cut over ranks (Shoeybi et al. 2019, arXiv:1909.08053). See docs/parallel.md."""

from __future__ import annotations

from trilithon.parallel.cross_entropy import vocabulary_cross_entropy
from trilithon.parallel.tensor.cutting import Cutting, cut_model
from trilithon.parallel.tensor.embedding import VocabularyEmbedding
from trilithon.parallel.tensor.linear import ColumnLinear, RowLinear
from trilithon.parallel.tensor.plan import Plan, make_plan
from trilithon.parallel.tensor.streams import share_stream

__all__ = [
    "ColumnLinear",
    "Cutting",
    "Plan",
    "RowLinear",
    "VocabularyEmbedding",
    "cut_model",
    "make_plan",
    "share_stream",
    "vocabulary_cross_entropy",
]
