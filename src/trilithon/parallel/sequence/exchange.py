"""The head-scattering all-to-all: from all heads of some tokens to some heads of all tokens, and back.

Attention mixes tokens and treats heads alike, so each rank gets every token for 1/q of the heads, computes ordinary
attention, and gives the tokens back. A block sends 4 B T D / q elements per rank, times (q-1)/q, and keeps 1/q of the
activations (DeepSpeed-Ulysses: Jacobs et al. 2023, arXiv:2309.14509, section 3).
"""

# B batch, H heads, T tokens, E channels of one head, q sequence ranks

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trilithon.contracts import Collectives, Tag
from trilithon.errors import ConfigError

_HEADS, _TOKENS = 1, 2


def heads_for_tokens(tensors: Sequence[Tensor], group: Collectives, tag: Tag) -> tuple[Tensor, ...]:
    """Each [B, H, T/q, E] -> [B, H/q, T, E], all in one collective. H may differ between them (queries and keys)."""
    for x in tensors:
        if x.shape[_HEADS] % group.world_size:
            raise ConfigError(
                f"{tag.module}: {x.shape[_HEADS]} attention heads on this rank do not split over {group.world_size} "
                "sequence ranks. Use a mesh.sequence that divides them (keys and values, too, when they have fewer)."
            )
    return _exchanged(tensors, _HEADS, _TOKENS, group, tag)


def tokens_for_heads(tensors: Sequence[Tensor], group: Collectives, tag: Tag) -> tuple[Tensor, ...]:
    """Each [B, H/q, T, E] -> [B, H, T/q, E]: the inverse."""
    return _exchanged(tensors, _TOKENS, _HEADS, group, tag)


def _exchanged(tensors: Sequence[Tensor], split: int, join: int, group: Collectives, tag: Tag) -> tuple[Tensor, ...]:
    if group.world_size == 1:
        return tuple(tensors)
    result: tuple[Tensor, ...] = _Exchange.apply(split, join, group, tag, *tensors)
    return result


def _exchange(tensors: Sequence[Tensor], split: int, join: int, group: Collectives, tag: Tag) -> tuple[Tensor, ...]:
    ranks = group.world_size
    parts = [x.unflatten(split, (ranks, -1)).movedim(split, 0) for x in tensors]  # [q, ...] each
    sizes = [part.numel() // ranks for part in parts]
    send = tensors[0].new_empty(ranks, sum(sizes))
    for part, block in zip(parts, send.split(sizes, 1)):
        block.unflatten(1, part.shape[1:]).copy_(part)
    received = torch.empty_like(send)
    group.all_to_all(received.view(-1), send.view(-1), tag).wait()
    blocks = received.split(sizes, 1)
    return tuple(b.unflatten(1, p.shape[1:]).movedim(0, join).flatten(join, join + 1) for b, p in zip(blocks, parts))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: int, join: int, group: Collectives, tag: Tag, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.split, ctx.join, ctx.group, ctx.tag = split, join, group, tag
        return _exchange(tensors, split, join, group, tag)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, None, None, *_exchange(grads, ctx.join, ctx.split, ctx.group, ctx.tag))
