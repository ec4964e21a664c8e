"""By the rules of which release of DeepSpeed a file written for it is read, where releases differ.

The one switch: the argument `deepspeed_release` of whatever reads a configuration, else the environment variable
TRILITHON_DEEPSPEED_RELEASE, else the newest. "0.16" stands for all releases up to 0.19.6, apart from the two defaults
(clipping, pinned memory) and the check of warm-up steps that 0.19.6 had already changed.
"""

from __future__ import annotations

import os
from typing import Literal, get_args

from trilithon.config.base import show
from trilithon.errors import ConfigError

Release = Literal["0.19", "0.16"]
NEWEST: Release = "0.19"
ENVIRONMENT = "TRILITHON_DEEPSPEED_RELEASE"

BEHAVIOURS: dict[str, tuple[str, str]] = {
    "`gradient_clipping` left out": ("1.0", "0, no clipping"),
    "`warmup_num_steps` of 0 or less": ("an error", "counts as 2"),
    "`warmup_max_lr` of `WarmupLR` left out": ("the parameter group's own rate", "0.001"),
    "stair counts of `OneCycle`": ("quantise the way up and down", "no effect"),
    "`WarmupCosineLR` after `total_num_steps`": ("stays at `cos_min_ratio`", "goes on along the cosine, up again"),
    "`pin_memory` of the offload blocks left out": ("true (no effect here)", "false (no effect here)"),
    "keys of features that 0.19 removed": ("refused, also when they are off", "noted when they are off"),
    "`backward()` of the compatible engine returns": (
        "the loss over the accumulation steps, always",
        "the loss over the accumulation steps where gradients are reduced, else the loss",
    ),
}
"""What differs -> how 0.19 has it, and how 0.16 has it."""

REMOVED = frozenset(
    """
    compression_training elasticity curriculum_learning progressive_layer_drop eigenvalue quantize_training
    sparse_attention amp nebula sparse_gradients graph_harvesting zero_optimization.mics_shard_size
    zero_optimization.mics_hierarchical_params_gather zero_optimization.zeropp_loco_param
    """.split()  # noqa: SIM905 (a list of 14 words)
)
"""Keys at which release 0.19 raises, whatever their value."""


def deepspeed_release(given: str | None = None) -> Release:
    """The release in force: `given`, else what the environment says, else the newest. Raises ConfigError."""
    value = given if given is not None else os.environ.get(ENVIRONMENT) or NEWEST
    for known in get_args(Release):
        if value == known:
            return known  # type: ignore[no-any-return]
    named = "deepspeed_release" if given is not None else ENVIRONMENT
    raise ConfigError(f"{named}={show(value)}: known are {' and '.join(get_args(Release))}.")


def removed(key: str) -> str:
    """What to say of a key of `REMOVED`."""
    return (
        f"{key}: DeepSpeed 0.19 raises at this key, whatever its value, because it no longer has the feature; leave "
        f'the key out, or read the file by the older rules (deepspeed_release="0.16", or {ENVIRONMENT}=0.16)'
    )


def behaviour_table() -> str:
    """`BEHAVIOURS` as a Markdown table, for the documentation."""
    rows = [f"| {what} | {newest} | {older} |" for what, (newest, older) in BEHAVIOURS.items()]
    return "\n".join(["| what | 0.19 (default) | 0.16 |", "| --- | --- | --- |", *rows]) + "\n"
