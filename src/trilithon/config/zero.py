"""How parameters, gradients and optimizer state are cut over the data-parallel ranks (ZeRO).

Rajbhandari et al. 2020 (arXiv:1910.02054, section 5): stage 1 cuts optimizer state, stage 2 gradients as well, stage 3
parameters as well. Sizes are in elements, not bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from trilithon.config.base import Count, Dtype, Flag, Positive, Section


def _whole_stage(value: Any) -> Any:
    # Literal compares with ==, so True and 1.0 would pass as 1 and keep their type.
    if isinstance(value, float) and value in (0.0, 1.0, 2.0, 3.0):
        return int(value)
    return str(value) if isinstance(value, bool) else value


class ZeroConfig(Section):
    """What is cut over the data-parallel ranks, in what portions it is communicated, and in which number format."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole_stage)] = 0
    """0: nothing is cut. 1: optimizer state. 2: also gradients. 3: also parameters."""
    bucket_numel: Positive | None = None
    """Elements communicated together at stages 0 to 2. null: chosen from the size of the model."""
    overlap: Flag = True
    """Communicate while computing. false: each collective is waited for at once."""
    comm_dtype: Dtype | None = None
    """Number format in which gradients travel. null: that of the parameters."""
    accumulate_dtype: Dtype | None = None
    """Number format in which gradients of several micro-batches are added. null: fp32 when there is more than one
    micro-batch, else that of the parameters."""
    reshard_after_forward: Flag = True
    """Stage 3: drop gathered parameters after forward and gather them again in backward. false keeps them."""
    prefetch_numel: Count | None = None
    """Stage 3: elements gathered ahead of their use; 0 turns reading ahead off. null: as many as the largest unit."""
    max_live_numel: Count = 1_000_000_000
    """Stage 3: elements of gathered parameters beyond which nothing more is gathered ahead."""
    persist_below_numel: Count = 0
    """Stage 3: parameters with fewer elements than this stay whole on every rank."""
    persist_total_numel: Count | None = None
    """Stage 3: elements that `persist_below_numel` may keep whole in total. null: no limit."""
    unit_classes: tuple[str, ...] = ()
    """Stage 3: names of module classes gathered as one unit each. Empty: units are chosen by size."""
    keep_gathered: tuple[str, ...] = ()
    """Stage 3: patterns of module names whose parameters stay gathered between forward and backward."""
    tile_above_numel: Positive | None = None
    """Stage 3: linear layers with more weights than this are executed in tiles of at most so many, each gathered by
    itself. null: none."""
    tile_modules: tuple[str, ...] = ("*",)
    """Stage 3: patterns of names of the modules that `tile_above_numel` is about."""
