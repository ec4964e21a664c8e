"""The random generators of one process: taken down, and put back so that the next draws are the same.

Python's `random`, numpy's global generator, torch's on the CPU and on the current accelerator. On another number of
ranks nobody's old state fits, so each rank gets a seed that follows from the run's seed, the step and its rank.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Plain data and small tensors."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def derive_random_states(seed: int, step: int, rank: int) -> None:
    """Seed every generator from (seed, step, rank) alone."""
    mixed = hashlib.blake2b(f"{seed}:{step}:{rank}".encode(), digest_size=8).digest()
    value = int.from_bytes(mixed, "little") % (1 << 63)
    random.seed(value)
    np.random.seed(value % (1 << 32))
    torch.manual_seed(value)  # the accelerators' generators as well
