"""Opening a checkpoint of either kind: ours, or one that DeepSpeed wrote."""

from __future__ import annotations

from pathlib import Path

from trilithon.checkpoint import reader
from trilithon.checkpoint.deepspeed_reader import is_deepspeed, open_deepspeed
from trilithon.checkpoint.reader import CheckpointReader


def open_checkpoint(folder: Path | str, tag: str | None = "latest") -> CheckpointReader:
    """Open one checkpoint under `folder`; see `reader.open_checkpoint`. Folders of DeepSpeed are recognised.

    Raises CheckpointError when there is none, and when it is incomplete or damaged.
    """
    if is_deepspeed(folder, tag):
        return open_deepspeed(folder, tag)
    return reader.open_checkpoint(folder, tag)
