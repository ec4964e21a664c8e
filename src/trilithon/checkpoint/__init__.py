"""Checkpoints: written by all ranks at once, read by any number of ranks, never half there.

The format and the resume contract are described in docs/checkpoints.md. This package knows tensors by name and range;
which of them a run has, and what they mean, is the engine's knowledge.
"""

from __future__ import annotations

from trilithon.checkpoint.agreement import Alone, Coordinator
from trilithon.checkpoint.convert import convert
from trilithon.checkpoint.deepspeed_export import ExportedFiles, export_deepspeed
from trilithon.checkpoint.difference import TensorDifference, differences
from trilithon.checkpoint.export import Exported, export, read_weights
from trilithon.checkpoint.manifest import Chunk, Entry, FileRecord, Manifest
from trilithon.checkpoint.opening import open_checkpoint
from trilithon.checkpoint.reader import CheckpointReader, Wanted, tags
from trilithon.checkpoint.retention import Retention
from trilithon.checkpoint.save import Contents, save
from trilithon.checkpoint.table import Holding, Span
from trilithon.checkpoint.verify import Problem, verify

__all__ = [
    "Alone",
    "CheckpointReader",
    "Chunk",
    "Contents",
    "Coordinator",
    "Entry",
    "Exported",
    "ExportedFiles",
    "FileRecord",
    "Holding",
    "Manifest",
    "Problem",
    "Retention",
    "Span",
    "TensorDifference",
    "Wanted",
    "convert",
    "differences",
    "export",
    "export_deepspeed",
    "open_checkpoint",
    "read_weights",
    "save",
    "tags",
    "verify",
]
