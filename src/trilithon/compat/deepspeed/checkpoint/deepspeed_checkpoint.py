"""`deepspeed.checkpoint.deepspeed_checkpoint`."""

from __future__ import annotations

from trilithon.compat.deepspeed.refused import refused

DeepSpeedCheckpoint = refused(
    "checkpoint.DeepSpeedCheckpoint",
    "Open a checkpoint, ours or DeepSpeed's, with trilithon.checkpoint.open_checkpoint.",
)
