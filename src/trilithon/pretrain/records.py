"""The records of a run that continues: what was written behind the checkpoint is taken back, and comes again."""

from __future__ import annotations

import json
from pathlib import Path

from trilithon.pretrain.artifacts import write_whole

_STEP_COLUMN = 0


def take_back(out: Path, step: int) -> None:
    """Drop what `out` records about steps after `step`: from metrics.jsonl, and from every CSV file.

    TensorBoard drops them by itself when it is told where the new records begin. Raises CheckpointError when a file
    cannot be written.
    """
    path = out / "metrics.jsonl"
    if path.exists():
        _rewrite(path, [line for line in _lines(path) if json.loads(line)["step"] <= step])
    for path in sorted((out / "csv").glob("*.csv")):
        lines = _lines(path)  # the first is the header
        _rewrite(path, lines[:1] + [row for row in lines[1:] if int(row.split(",")[_STEP_COLUMN]) <= step])


def _lines(path: Path) -> list[str]:
    """Whole lines: one that was cut when its process was killed is none."""
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


def _rewrite(path: Path, lines: list[str]) -> None:
    write_whole(path, lambda stream: stream.write("".join(lines).encode()))
