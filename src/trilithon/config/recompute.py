"""Which blocks forget their activations and compute them again in backward, and where their inputs rest meanwhile.

Chen et al. 2016 (arXiv:1604.06174, section 4); inputs in host memory: Rajbhandari et al. 2021 (arXiv:2104.07857,
section 5.1.2).
"""

from __future__ import annotations

from typing import Literal

from trilithon.config.base import Positive, Section


class RecomputeConfig(Section):
    """Blocks that keep their inputs instead of their activations. Without `classes` and `modules`: those that stand
    several times in a list of modules."""

    classes: tuple[str, ...] = ()
    """Names of module classes to recompute."""
    modules: tuple[str, ...] = ()
    """Patterns of module names to recompute."""
    every: Positive = 1
    """Recompute the first of every so many blocks; the others keep their activations."""
    tier: Literal["device", "host"] = "device"
    """Where the inputs of the blocks rest until backward: on the device, or in host memory."""
