"""What a load did, part by part, and what a save wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Names = dict[str, list[str]]  # by part


@dataclass
class LoadReport:
    """restored: taken from the checkpoint. initialised: not in it, or not asked for, so as it was before the load.
    ignored: in the checkpoint and without a place here. Each by part ("weights", "exp_avg", ...), with names.

    notes: what else is worth knowing, a sentence each. client_state: what was handed to `save`.
    """

    path: Path
    tag: str
    step: int
    saved_by: str  # world size, stage and precision of the run that saved
    restored: Names = field(default_factory=dict)
    initialised: Names = field(default_factory=dict)
    ignored: Names = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    client_state: Mapping[str, Any] = field(default_factory=dict)
    bytes_read: int = 0  # by this rank

    def counts(self) -> dict[str, dict[str, int]]:
        """{"restored": {part: n}, "initialised": ..., "ignored": ...}"""
        kinds = {"restored": self.restored, "initialised": self.initialised, "ignored": self.ignored}
        return {kind: {part: len(names) for part, names in parts.items()} for kind, parts in kinds.items()}

    def __str__(self) -> str:
        lines = [f"loaded {self.path} (step {self.step}, saved by {self.saved_by})"]
        for kind, parts in self.counts().items():
            if parts:
                lines.append(f"  {kind}: " + ", ".join(f"{part} {count}" for part, count in parts.items()))
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class SaveReport:
    """One finished save. blocked_s: how long training stood still; seconds: until everything was durable."""

    path: Path
    step: int
    bytes: int  # of all ranks
    seconds: float
    blocked_s: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SaveProgress:
    """A save in the background, on this rank: bytes written and to be written."""

    path: Path
    written: int
    total: int
