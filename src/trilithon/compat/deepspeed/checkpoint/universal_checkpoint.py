"""`deepspeed.checkpoint.universal_checkpoint`: every checkpoint loads on any number of ranks as it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SubparamShape:
    """Of parameters that are several in one, in a model's `universal_checkpoint_info()`."""

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int
