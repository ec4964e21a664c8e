"""A model cut into stages that work on different micro-batches at the same time. See docs/parallel.md."""

from __future__ import annotations

from trilithon.parallel.pipeline.layers import Elsewhere, Layer, LayerSpec, TiedLayerSpec
from trilithon.parallel.pipeline.measure import layer_seconds
from trilithon.parallel.pipeline.module import PipelineModule
from trilithon.parallel.pipeline.schedule import Action, Kind, make_orders
from trilithon.parallel.pipeline.simulate import Timeline, simulate

__all__ = [
    "Action",
    "Elsewhere",
    "Kind",
    "Layer",
    "LayerSpec",
    "PipelineModule",
    "TiedLayerSpec",
    "Timeline",
    "layer_seconds",
    "make_orders",
    "simulate",
]
