"""What `engine.save` keeps, and how large its files get."""

from __future__ import annotations

from trilithon.config.base import Positive, Section


class CheckpointConfig(Section):
    """Which checkpoints stay in a folder. The newest always does, and so does the one that the run was loaded from."""

    keep: Positive | None = None
    """How many of the newest checkpoints stay. null: all."""
    keep_every: Positive | None = None
    """Checkpoints at multiples of this step stay in addition to the newest `keep`. null: none."""
    file_bytes: Positive = 4 * 2**30
    """Largest size of a file of tensors; a rank that holds more writes several."""
