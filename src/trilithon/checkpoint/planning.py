"""Who writes what: every element of every tensor once, whatever the ranks hold in common, and evenly.

The plans are those of torch.distributed.checkpoint, over flattened tensors cut into ranges, and its deduplication
decides which holder of a replica writes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from trilithon.checkpoint.manifest import Entry, dtype_name
from trilithon.checkpoint.payload import file_bytes
from trilithon.checkpoint.table import Holding, Span
from trilithon.errors import CheckpointError

_REPLICA_BYTES = 16 * 2**20  # pieces of what several ranks hold: small enough to share out evenly


@dataclass(frozen=True, slots=True)
class Piece:
    """A span that this rank may write, and the index of its holding."""

    holding: int
    span: Span


Offer = tuple[Span, ...]  # what one rank could write, replicas first


def pieces_of(holdings: Sequence[Holding], file_limit: int) -> list[Piece]:
    """The spans of all holdings, those of replicas cut small; replicas first, so that the rest does not unbalance."""
    found = []
    for index, holding in sorted(enumerate(holdings), key=lambda item: not item[1].replicated):
        limit = min(_REPLICA_BYTES, file_limit) if holding.replicated else file_limit
        for span in holding.spans:
            found += [Piece(index, part) for part in _cut(span, max(limit // span.dtype.itemsize, 1))]
    return found


def _cut(span: Span, limit: int) -> list[Span]:
    if span.numel <= limit:
        return [span]
    count = -(-span.numel // limit)
    bounds = [span.numel * index // count for index in range(count + 1)]
    return [
        replace(span, start=span.start + low, numel=high - low, offset=span.offset + low)
        for low, high in pairwise(bounds)
    ]


def offer_of(pieces: Sequence[Piece]) -> Offer:
    return tuple(piece.span for piece in pieces)


def _item(span: Span) -> WriteItem:
    size = torch.Size([span.numel])
    chunk = ChunkStorageMetadata(torch.Size([span.start]), size)
    return WriteItem(
        _index(span), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, TensorProperties(span.dtype), size)
    )


def _index(span: Span) -> MetadataIndex:
    return MetadataIndex(f"{span.part}/{span.name}", torch.Size([span.start]))


def assign(offers: Sequence[Offer], rank: int) -> set[tuple[str, int]]:
    """(part/name, start) of the pieces that `rank` writes; the same arithmetic on every rank."""
    mine = dedup_save_plans([SavePlan([_item(span) for span in offer]) for offer in offers])[rank]
    return {(item.index.fqn, (item.index.offset or (0,))[0]) for item in mine.items}


def chosen(pieces: Sequence[Piece], assigned: set[tuple[str, int]]) -> list[Piece]:
    return [p for p in pieces if (f"{p.span.part}/{p.span.name}", p.span.start) in assigned]


def entries_of(offers: Sequence[Offer]) -> list[Entry]:
    """Every tensor that some rank offers, in order of first appearance, without chunks.

    Raises CheckpointError if ranks disagree on a shape or type: their models differ.
    """
    found: dict[tuple[str, str], Entry] = {}
    for rank, offer in enumerate(offers):
        for span in offer:
            entry = Entry(span.part, span.name, dtype_name(span.dtype), span.shape)
            before = found.setdefault((span.part, span.name), entry)
            if before != entry:
                raise CheckpointError(
                    f"{span.part} of '{span.name}' is {entry.dtype} {list(entry.shape)} on rank {rank} and "
                    f"{before.dtype} {list(before.shape)} on a rank before it; build the same model on all ranks."
                )
    return list(found.values())


def check_offers(offers: Sequence[Offer], entries: Sequence[Entry]) -> None:
    """Raise CheckpointError for elements that no rank offers."""
    ranges: dict[tuple[str, str], dict[int, int]] = {}
    for offer in offers:
        for span in offer:
            ranges.setdefault((span.part, span.name), {})[span.start] = span.numel
    for entry in entries:
        at = 0
        for start, numel in sorted(ranges[entry.part, entry.name].items()):
            if start != at:
                raise CheckpointError(
                    f"{entry.part} of '{entry.name}': elements {min(at, start)} to {max(at, start) - 1} are held by "
                    f"{'no rank' if start > at else 'two ranks in different cuts'}."
                )
            at += numel
        if at != math.prod(entry.shape):
            raise CheckpointError(f"{entry.part} of '{entry.name}': elements from {at} on are held by no rank.")


def files_of(pieces: Sequence[Piece], holdings: Sequence[Holding], file_limit: int) -> list[list[Piece]]:
    """One rank's pieces in the order in which they are written, cut into files.

    Holdings stay together, so that each is opened once; wide types come first, so that every tensor is aligned.
    """

    def width(index: int) -> int:
        return max((span.dtype.itemsize for span in holdings[index].spans), default=0)

    stored = [piece for piece in pieces if piece.span.numel]
    order = sorted(stored, key=lambda p: (-width(p.holding), p.holding, -p.span.dtype.itemsize))
    files: list[list[Piece]] = []
    size = 0
    for piece in order:
        full = files and size + piece.span.bytes > file_limit
        if not files or full or size % piece.span.dtype.itemsize:
            files.append([])
            size = 0
        files[-1].append(piece)
        size += piece.span.bytes
    return files


def bytes_of_files(files: Sequence[Sequence[Piece]]) -> int:
    return sum(file_bytes([piece.span for piece in file]) for file in files)
