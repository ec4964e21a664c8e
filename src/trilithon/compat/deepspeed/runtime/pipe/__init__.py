"""`deepspeed.runtime.pipe`."""

from __future__ import annotations

from trilithon.compat.deepspeed.resolve import resolver
from trilithon.compat.deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from trilithon.compat.deepspeed.runtime.pipe.topology import ProcessTopology

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]

__getattr__ = resolver(__name__, {}, ("engine", "schedule"))
