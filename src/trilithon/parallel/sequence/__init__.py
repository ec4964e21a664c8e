"""Tokens cut over ranks, attention by heads (Jacobs et al. 2023, arXiv:2309.14509). See docs/parallel.md."""

from __future__ import annotations

from trilithon.parallel.sequence.exchange import heads_for_tokens, tokens_for_heads
from trilithon.parallel.sequence.modules import CutTokens, HeadExchange, cut_sequences

__all__ = ["CutTokens", "HeadExchange", "cut_sequences", "heads_for_tokens", "tokens_for_heads"]
