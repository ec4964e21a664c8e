"""How the stages of a pipeline take turns. Without effect while mesh.pipe is 1."""

from __future__ import annotations

from typing import Literal

from trilithon.config.base import Count, Flag, Positive, Section


class PipelineConfig(Section):
    """What the stages of mesh.pipe do when. The number of micro-batches in a step is batch.accumulation."""

    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    """1f1b keeps few micro-batches alive; gpipe all of them; interleaved waits less and sends more; zero-bubble fills
    waiting with weight gradients."""
    chunks: Positive | None = None
    """Parts of the model on each stage, for schedule "interleaved". null: 2 there, 1 elsewhere."""
    partition: str | None = None
    """What is balanced between stages: "parameters", "uniform" or "type:<regex>" of layer classes. null: what the model
    says, else parameters."""
    recompute_interval: Count = 0
    """So many layers together keep their input and are computed again in backward. 0: none, or what the model says."""
    dynamic_shape: Flag = False
    """Shapes between stages depend on values of the batch, so each message is preceded by its shape."""

    @property
    def chunks_per_stage(self) -> int:
        return self.chunks or (2 if self.schedule == "interleaved" else 1)
