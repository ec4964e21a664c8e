"""What is recorded during training, where, and how often."""

from __future__ import annotations

from pathlib import Path

from trilithon.config.base import Flag, Positive, Section


class MonitorConfig(Section):
    """Sinks for the values of each step."""

    folder: Path | None = None
    """Folder for everything that is recorded. null: nothing is written to disk."""
    every: Positive = 10
    """Steps between two records and between two progress lines."""
    jsonl: Flag = True
    """Write metrics.jsonl, one object a record, when a folder is given."""
    csv: Flag = False
    """Write one CSV file for each value, when a folder is given."""
    tensorboard: Flag = False
    """Write TensorBoard events, when a folder is given."""
    profile_step: Positive | None = None
    """Step at which time, memory and bytes sent are measured in detail. null: none."""
    quiet: Flag = False
    """Print no progress lines."""
