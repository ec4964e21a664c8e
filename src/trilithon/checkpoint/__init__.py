"""Checkpoints: written by all ranks at once, read by any number of ranks, never half there.

The format and the resume contract are described in docs/checkpoints.md. This package knows tensors by name and range;
which of them a run has, and what they mean, is the engine's knowledge.
"""

from __future__ import annotations

from trilithon.checkpoint.agreement import Alone, Coordinator
from trilithon.checkpoint.manifest import Chunk, Entry, FileRecord, Manifest
from trilithon.checkpoint.reader import CheckpointReader, Wanted, open_checkpoint, tags
from trilithon.checkpoint.retention import Retention
from trilithon.checkpoint.save import Contents, save
from trilithon.checkpoint.table import Holding, Span

__all__ = [
    "Alone",
    "CheckpointReader",
    "Chunk",
    "Contents",
    "Coordinator",
    "Entry",
    "FileRecord",
    "Holding",
    "Manifest",
    "Retention",
    "Span",
    "Wanted",
    "open_checkpoint",
    "save",
    "tags",
]
