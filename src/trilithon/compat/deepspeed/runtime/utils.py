"""`deepspeed.runtime.utils`: what programs import from there."""

from __future__ import annotations

import logging

import torch

from trilithon.compat.deepspeed.resolve import resolver

logger = logging.getLogger(__name__)


def see_memory_usage(message: str, force: bool = False) -> None:
    """A line on what the device has allocated; with `force` only, as in DeepSpeed."""
    if not force:
        return
    if not torch.cuda.is_available():
        logger.info("%s | no accelerator, so no device memory", message)
        return
    now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    logger.info("%s | allocated %.2f GB, at most %.2f GB since last asked", message, now / 2**30, peak / 2**30)
    torch.cuda.reset_peak_memory_stats()


__getattr__ = resolver(
    __name__,
    {},
    (),
    {
        "clip_grad_norm_": "gradient_clipping in the configuration clips; engine.get_global_grad_norm() has the norm.",
        "get_grad_norm": "engine.get_global_grad_norm() has the norm.",
        "partition_balanced": "trilithon.PipelineModule(partition_method=...) balances layers.",
        "partition_uniform": "trilithon.PipelineModule(partition_method=...) balances layers.",
    },
)
