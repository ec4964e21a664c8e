"""What each group was asked to do: one `Call` per collective, the last few kept.

A call has a `code`, a 31-bit number that agrees between ranks exactly when they mean the same collective: same position
in the group, kind, dtype, size and module. On gloo the code is the message tag, so two different collectives can never
exchange bytes; they wait, and the watchdog compares the journals and names the first difference.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch

from trilithon.contracts import Tag

KEPT = 64


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as one rank issued it."""

    sequence: int  # position among the calls of its group, from 0
    kind: str
    dtype: torch.dtype
    numel: int  # of the whole tensor that the group works on
    tag: Tag

    @property
    def signature(self) -> str:
        """What must agree between ranks, for people."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} of {self.numel} {dtype} for {self.tag.module}"

    @property
    def code(self) -> int:
        """What must agree between ranks, as a message tag in [0, 2**31)."""
        text = f"{self.sequence}|{self.kind}|{self.dtype}|{self.numel}|{self.tag.module}"
        return crc32(text.encode()) & 0x7FFFFFFF

    def as_json(self) -> dict[str, Any]:
        """For the watchdog's exchange between ranks; tensors and dtypes become text."""
        return {
            "sequence": self.sequence,
            "kind": self.kind,
            "signature": self.signature,
            "module": self.tag.module,
            "parameters": list(self.tag.parameters),
            "step": self.tag.step,
            "micro_step": self.tag.micro_step,
        }


class Journal:
    """The calls of one group on this rank, newest last; the oldest are forgotten after `KEPT`."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks  # global ranks of the members, in group order
        self.calls: deque[Call] = deque(maxlen=KEPT)
        self._next = 0

    def issue(self, kind: str, dtype: torch.dtype, numel: int, tag: Tag) -> Call:
        """Write down the next call of this group."""
        call = Call(self._next, kind, dtype, numel, tag)
        self._next += 1
        self.calls.append(call)
        return call
