"""The loss on held-out text, and a sample of what the model writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trilithon.data import TextCorpus, TokenBlocks
from trilithon.models import GPT
from trilithon.pretrain.agreement import Agreement


def held_out_loss(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    blocks: TokenBlocks,
    agreement: Agreement,
    *,
    part: tuple[int, int] | None = None,
    micro_size: int,
    max_sequences: int,
    device: torch.device,
) -> float:
    """Mean loss in nats per token over held-out blocks, the same on every rank.

    loss_of: mean loss of a batch of inputs and targets [B, T]. part: index of this rank's part of the blocks and number
    of parts, when several ranks share one. micro_size: blocks of one forward. At most max_sequences blocks are taken by
    all ranks together, spread evenly over the text and always the same ones, whatever the number of ranks.
    Every rank computes equally many batches, because at ZeRO stage 3 a forward pass is collective; a rank that runs out
    of blocks computes one again, with weight 0.
    """
    index, parts = part or (agreement.rank, agreement.world_size)
    num_blocks = min(len(blocks), max_sequences)
    per_round = micro_size * parts
    total = weight = 0.0
    for start in range(0, num_blocks, per_round):
        first = start + index * micro_size
        mine = [blocks[i * len(blocks) // num_blocks] for i in range(first, min(first + micro_size, num_blocks))]
        used = mine or [blocks[0]]
        inputs = torch.stack([block[0] for block in used]).to(device)
        targets = torch.stack([block[1] for block in used]).to(device)
        loss = float(loss_of(inputs, targets))
        num_tokens = inputs.numel() if mine else 0
        if num_tokens:
            total += loss * num_tokens
            weight += num_tokens
    return agreement.weighted_mean(total, weight, "pretrain.held_out_loss")


@torch.no_grad()
def sample_text(
    model: GPT,
    corpus: TextCorpus,
    *,
    prompt: str,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    device: torch.device,
) -> str:
    """What the model writes after `prompt`, the prompt included. Collective at ZeRO stage 3; equal on every rank."""
    start: list[Any] = [corpus.tokenizer.end, *corpus.tokenizer.encode(prompt).tolist()]
    tokens = torch.tensor([start], device=device)
    was_training = model.training
    model.eval()
    generator = torch.Generator(device=device).manual_seed(seed)
    out = model.generate(tokens, num_tokens, temperature=temperature, top_k=top_k, generator=generator)
    model.train(was_training)
    ids = out[0, 1:].tolist()
    ends = [place for place, token in enumerate(ids) if token == corpus.tokenizer.end and place >= len(start) - 1]
    return corpus.tokenizer.decode(ids[: ends[0]] if ends and ends[0] > len(start) - 1 else ids)
