"""Factors that bring every parameter's momentum to one magnitude before a common scale is taken over all of them.

With one scale for the whole model, a parameter whose momentum is small sends mostly noise. (Li et al. 2022, "1-bit
LAMB", arXiv:2104.06069, section 4.2: scaling coefficients of the fused momentum.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from trilithon.contracts import Collectives, Tag
from trilithon.kernels import sum_of_squares
from trilithon.optim.fused import Fused


def equalising_factors(vector: Fused, momentum: Tensor, group: Collectives) -> dict[str, float]:
    """By name: mean of all root mean squares / its own; 1 for a parameter without momentum. Collective.

    momentum: [numel] f32, the same on all ranks. Rank 0's numbers are taken, so that no rounding tells ranks apart.
    """
    sizes = torch.tensor(
        [
            (sum_of_squares(here) / here.numel()) ** 0.5
            for name in vector.names
            for here in [vector.view(name, momentum)]
        ],
        dtype=torch.float64,
        device=momentum.device,
    )
    moving = sizes > 0
    mean = sizes[moving].mean() if moving.any() else sizes.new_ones(())
    factors = torch.where(moving, mean / sizes, 1.0)
    group.broadcast(factors, 0, Tag("scaling of the momentum")).wait()
    return dict(zip(vector.names, factors.tolist(), strict=True))
