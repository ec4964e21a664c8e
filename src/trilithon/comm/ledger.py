"""What communication costs: every collective is counted where it is issued.

Sent bytes follow the ring formulas of the field (Thakur et al. 2005, section 4; for ZeRO see Rajbhandari et al. 2020,
arXiv:1910.02054, section 7), per rank and to the integer, whichever transport moves them. The counts are therefore the
same on gloo, NCCL and shared memory, and a test can hold a prediction against a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class Entry:
    """The running totals of one (kind, group, dtype) on this rank."""

    kind: str
    group: str
    dtype: torch.dtype
    calls: int = 0
    elements_in: int = 0
    elements_out: int = 0
    sent_bytes: int = 0


@dataclass(slots=True)
class Sent:
    """What was sent inside one `Ledger.measure()` block; filled in while the block runs and final after it."""

    all_gather_bytes: int = 0
    reduce_scatter_bytes: int = 0
    all_reduce_bytes: int = 0
    broadcast_bytes: int = 0
    all_gather_object_bytes: int = 0
    all_to_all_bytes: int = 0
    message_bytes: int = 0
    total_bytes: int = 0
    calls: int = 0


def all_gather_bytes(shard_numel: int, itemsize: int, world_size: int) -> int:
    """Bytes one rank sends so that every rank holds `world_size * shard_numel` elements."""
    return (world_size - 1) * shard_numel * itemsize


def reduce_scatter_bytes(shard_numel: int, itemsize: int, world_size: int) -> int:
    """Bytes one rank sends so that every rank holds the sum of its own `shard_numel` elements."""
    return (world_size - 1) * shard_numel * itemsize


def all_to_all_bytes(slice_numel: int, itemsize: int, world_size: int) -> int:
    """Bytes one rank sends when it has a slice of its own for every other rank."""
    return (world_size - 1) * slice_numel * itemsize


def sent_to_others_bytes(numels: Sequence[int], itemsize: int, rank: int) -> int:
    """Bytes one rank sends when it has numels[r] elements for rank r; its own stay."""
    return (sum(numels) - numels[rank]) * itemsize


def all_reduce_bytes(numel: int, itemsize: int, world_size: int) -> int:
    """2 (W-1)/W of the tensor, rounded up to whole bytes."""
    return -(-2 * (world_size - 1) * numel * itemsize // world_size)


def broadcast_bytes(numel: int, itemsize: int, world_size: int) -> int:
    """The whole tensor once per rank, as in a ring; nothing for a group of one."""
    return numel * itemsize if world_size > 1 else 0


class Ledger:
    """Counts calls, elements and sent bytes by kind of collective, group and dtype."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str, torch.dtype], list[int]] = {}
        self._open: list[Sent] = []

    def record(
        self, kind: str, group_name: str, dtype: torch.dtype, *, elements_in: int, elements_out: int, sent_bytes: int
    ) -> None:
        """Add one call: the elements this rank put in, those it got out, and the bytes it sent."""
        totals = self._entries.setdefault((kind, group_name, dtype), [0, 0, 0, 0])
        totals[0] += 1
        totals[1] += elements_in
        totals[2] += elements_out
        totals[3] += sent_bytes
        for sent in self._open:
            sent.calls += 1
            sent.total_bytes += sent_bytes
            name = f"{kind}_bytes"
            if name in _COUNTED:
                setattr(sent, name, getattr(sent, name) + sent_bytes)

    def rows(self) -> list[Entry]:
        """All totals, ordered by kind, group and dtype."""
        keys = sorted(self._entries, key=lambda key: (key[0], key[1], str(key[2])))
        return [Entry(*key, *self._entries[key]) for key in keys]

    def sent_bytes(self, kind: str | None = None, group: str | None = None) -> int:
        """Bytes sent by this rank so far, of one kind and one group or of all."""
        return sum(
            entry.sent_bytes
            for entry in self.rows()
            if (kind is None or entry.kind == kind) and (group is None or entry.group == group)
        )

    def calls(self, kind: str | None = None) -> int:
        """How many collectives were issued, of one kind or of all."""
        return sum(entry.calls for entry in self.rows() if kind is None or entry.kind == kind)

    @contextmanager
    def measure(self) -> Iterator[Sent]:
        """Count what is issued inside the block: `with ledger.measure() as sent: ...; sent.total_bytes`. Nests."""
        sent = Sent()
        self._open.append(sent)
        try:
            yield sent
        finally:
            self._open = [other for other in self._open if other is not sent]


_COUNTED = frozenset(field.name for field in fields(Sent) if field.name.endswith("_bytes"))
