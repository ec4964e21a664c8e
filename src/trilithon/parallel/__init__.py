"""Who computes which part: matrices over tensor ranks, tokens over sequence ranks. See docs/parallel.md."""

from __future__ import annotations

from trilithon.parallel.dropout import Dropout
from trilithon.parallel.loss import TokenLoss
from trilithon.parallel.slicing import ParameterSlice

__all__ = ["Dropout", "ParameterSlice", "TokenLoss"]
