"""`deepspeed.utils.logging`: a logger of the name that scripts know, and messages from some ranks only."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

logger = logging.getLogger("DeepSpeed")


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else -1


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; None or -1 among them: on every rank."""
    rank = _rank()
    if not ranks or rank < 0 or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """As `log_dist`, once for each message."""
    _once(message, tuple(ranks or ()), level)


_once = functools.lru_cache(maxsize=256)(log_dist)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """By name: debug, info, warning, error or critical. Raises ValueError for another one."""
    (custom_logger or logger).setLevel(log_level_str.upper())


def see_memory_usage(message: str, force: bool = False) -> None:
    """A line on what the device has allocated; with `force` only, as in DeepSpeed."""
    if force and not torch.cuda.is_available():
        logger.info("%s | no accelerator, so no device memory", message)
    elif force:
        now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        logger.info("%s | allocated %.2f GB, at most %.2f GB since last asked", message, now / 2**30, peak / 2**30)
        torch.cuda.reset_peak_memory_stats()
