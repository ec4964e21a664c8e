"""Smaller models: a student that learns from a teacher.

from trilithon.compress import StagedDistillation
"""

from __future__ import annotations

from trilithon.compress.distill import StagedDistillation, distillation_loss, stop_after

__all__ = ["StagedDistillation", "distillation_loss", "stop_after"]
