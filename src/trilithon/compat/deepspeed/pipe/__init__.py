"""`deepspeed.pipe`: models as lists of layers."""

from __future__ import annotations

from trilithon.compat.deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
