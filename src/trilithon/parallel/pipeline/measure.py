"""How long each layer takes, to cut a model by time instead of by parameters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trilithon.parallel.pipeline.layers import Layer, layers_of


def layer_seconds(model: nn.Module, inputs: Any, *, repeats: int = 5) -> list[float]:
    """Seconds of forward and backward of each layer in this process, medians of `repeats` after one more.

    model: whole (a PipelineModule without num_stages, a Sequential, a model with pipeline_layers). inputs: those of one
    micro-batch. Pass the result of one rank to PipelineModule(partition_method=...) on all of them: ranks that measure
    for themselves would cut differently. Gradients of parameters are left as they were.
    """
    found, x = [], inputs
    for layer in layers_of(model):
        params = [p for name in layer.modules for p in model.get_submodule(name).parameters() if p.requires_grad]
        seconds, x = _measured(layer, x, params, repeats)
        found.append(seconds)
    return found


def _measured(layer: Layer, x: Any, params: Sequence[nn.Parameter], repeats: int) -> tuple[float, Any]:
    """(seconds, what the layer returns, apart from its graph)."""
    times: list[float] = []
    y: Any = None
    for _ in range(repeats + 1):
        fresh = pytree.tree_map_only(Tensor, _as_input, x)
        begun = _now()
        y = layer.run(fresh)
        outputs = [leaf for leaf in pytree.tree_leaves(y) if isinstance(leaf, Tensor) and leaf.requires_grad]
        wanted = [leaf for leaf in pytree.tree_leaves(fresh) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if outputs and (wanted or params):
            ones = [torch.ones_like(leaf) for leaf in outputs]
            torch.autograd.grad(outputs, [*wanted, *params], ones, allow_unused=True)
        times.append(_now() - begun)
    return statistics.median(times[1:]), pytree.tree_map_only(Tensor, Tensor.detach, y)


def _as_input(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
