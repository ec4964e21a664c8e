"""Which blocks forget their activations and compute them again in backward, and where their inputs rest meanwhile.

Chen et al. 2016 (arXiv:1604.06174, section 4); inputs cut over tensor ranks and contiguous buffers: Rajbhandari et al.
2020 (arXiv:1910.02054, sections 6.1 and 6.3); in host memory: Rajbhandari et al. 2021 (arXiv:2104.07857, section
5.1.2); results that are kept: Korthikanti et al. 2022 (arXiv:2205.05198, section 5).
"""

from __future__ import annotations

from typing import Literal

from trilithon.config.base import Flag, Positive, Section

PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_dot_product*", "trilithon::*")


class RecomputeConfig(Section):
    """Blocks that keep their inputs instead of their activations. Without `classes` and `modules`: those that stand
    several times in a list of modules."""

    classes: tuple[str, ...] = ()
    """Names of module classes to recompute."""
    modules: tuple[str, ...] = ()
    """Patterns of module names to recompute."""
    every: Positive = 1
    """Recompute the first of every so many blocks; the others keep their activations."""
    policy: Literal["full", "selective"] = "full"
    """"full": everything between a block's input and its output is computed again. "selective": except the results of
    `keep_ops`, which stay on the device."""
    keep_ops: tuple[str, ...] = PRODUCTS
    """With policy "selective", patterns of names of the operators whose results stay: products with weights, fused
    attention, and what tensor ranks exchange."""
    tier: Literal["device", "host"] = "device"
    """Where the inputs of the blocks rest until backward: on the device, or in host memory."""
    partition: Flag = False
    """Each tensor rank keeps its part of the inputs and gathers the others when the block is computed again."""
    contiguous: Flag = False
    """Copy inputs into buffers that are made once and used again, so that they leave no gaps among other tensors."""
    number: Positive | None = None
    """Inputs that one contiguous buffer has room for. null: one for each recomputed block."""
    synchronize: Flag = False
    """Wait for the device at both ends of each forward of a block."""
    profile: Flag = False
    """Measure forwards of blocks and log the seconds of each step; waits as `synchronize` does."""
