"""How many parameters one rank of a mesh holds, and how many ranks hold the same ones. Arithmetic on shapes.

Stages of a pipeline have some of the layers, tensor ranks a slice of each matrix, expert ranks some of the experts;
over the ranks that are left, and hold a part alike, ZeRO cuts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trilithon.config import Config
from trilithon.config.mesh import EXPERT_RANKS, REPLICAS
from trilithon.models.settings import GPTConfig


@dataclass(frozen=True, slots=True)
class _Layer:
    """Of one layer on one tensor rank: elements of matrices, of what is whole, and of its experts; and all of it on one
    rank alone, by which stages are balanced."""

    kind: str
    matrices: int
    whole: int
    experts: int
    weight: int


Part = tuple[int, int]  # elements here, ranks that hold the same ones


def parts_by_stage(shape: GPTConfig, settings: Config, ranks: int, expert_degree: int) -> list[list[Part]]:
    """Of each stage, what a rank of it holds; one stage without a pipeline. Padding of the vocabulary included.

    Raises ConfigError when the layers do not make so many stages.
    """
    axes, tensor = settings.mesh.axes(ranks), settings.mesh.tensor
    stages, replicas = axes.size("pipe"), axes.size(REPLICAS)
    layers = _layers(shape, tensor)
    vocabulary = -(-shape.vocab_size // tensor) * shape.width
    found = []
    homes = _homes(layers, settings, stages)
    tied = {homes[0], homes[-1]} if shape.tie_embeddings else set()
    for stage in range(stages):
        here = [layer for layer, home in zip(layers, homes, strict=True) if home == stage]
        matrices, whole = sum(layer.matrices for layer in here), sum(layer.whole for layer in here)
        parts = [(matrices, replicas)]
        if stage in tied:  # one matrix, of which both stages have a copy
            parts.append((vocabulary, replicas * len(tied)))
        # under cut norms what is whole is so on all tensor ranks, which share its gradient
        parts.append((whole, replicas * (tensor if settings.tensor.cut_norms else 1)))
        experts = sum(layer.experts for layer in here)
        if experts:
            parts.append((experts // expert_degree, axes.size(EXPERT_RANKS) // expert_degree))
        found.append(_joined(parts))
    return found


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Parts that the same ranks hold are one."""
    sizes: dict[int, int] = {}
    for numel, holders in parts:
        sizes[holders] = sizes.get(holders, 0) + numel
    return [(numel, holders) for holders, numel in sizes.items() if numel]


def _layers(shape: GPTConfig, tensor: int) -> list[_Layer]:
    """As a pipeline cuts them. A tied matrix is counted apart."""
    norm = shape.width * (1 if shape.norm == "rms" else 2)
    whole_vocabulary = shape.vocab_size * shape.width
    vocabulary = 0 if shape.tie_embeddings else -(-shape.vocab_size // tensor) * shape.width
    attention, mlp = 4 * shape.width**2, (2 if shape.activation == "gelu" else 3) * shape.width * shape.inner_width
    dense = _Layer("Block", (attention + mlp) // tensor, 2 * norm, 0, attention + mlp + 2 * norm)
    experts, router = shape.experts * mlp, shape.experts * shape.width
    sparse = _Layer("Block", attention // tensor, 2 * norm + router, experts, attention + 2 * norm + router + experts)
    blocks = [sparse if index in shape.sparse_layers() else dense for index in range(shape.num_layers)]
    first = _Layer("Embedding", vocabulary, 0, 0, whole_vocabulary)
    return [first, *blocks, _Layer("Head", vocabulary, norm, 0, whole_vocabulary)]


def _homes(layers: Sequence[_Layer], settings: Config, stages: int) -> list[int]:
    """The stage of each layer."""
    if stages == 1:
        return [0] * len(layers)
    from trilithon.parallel.pipeline.partition import cut_by_weight, weights_by_method  # its package imports torch

    pipeline = settings.pipeline
    method = pipeline.partition or "parameters"
    weights = weights_by_method(method, [layer.weight for layer in layers], [layer.kind for layer in layers])
    bounds = cut_by_weight(weights, stages * pipeline.chunks_per_stage)
    homes: list[int] = []
    for part, (start, stop) in enumerate(pairwise(bounds)):
        homes += [part % stages] * (stop - start)
    return homes
