"""Update rules: gradients to new values, over flat slices of parameters.

Start at `build.make_update`; `formulas` holds the mathematics, and `loss_scale`, `clip` and `learning_rate` what
surrounds it.
"""

from __future__ import annotations

from trilithon.optim.build import make_update
from trilithon.optim.clip import agreed_norm, clip_factor, first_non_finite, squared_norm
from trilithon.optim.groups import Group, groups_of
from trilithon.optim.learning_rate import Factor, LearningRate
from trilithon.optim.loss_scale import DynamicScale, NoScale, StaticScale

__all__ = [
    "DynamicScale",
    "Factor",
    "Group",
    "LearningRate",
    "NoScale",
    "StaticScale",
    "agreed_norm",
    "clip_factor",
    "first_non_finite",
    "groups_of",
    "make_update",
    "squared_norm",
]
