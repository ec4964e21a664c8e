"""Random numbers of a pipelined step: each layer's follow from the step, the micro-batch and the layer alone.

One number is drawn from torch's default generator per step. From it comes a seed for every (micro-batch, layer), so
dropout does not depend on how many stages there are or in which order they work; afterwards the generator goes on from
where that draw left it, and its state says everything that a checkpoint needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = 2**64 - 1


def layer_seed(draw: int, micro: int, layer: int) -> int:
    """A seed in [0, 2^63) (the finaliser of SplitMix64, Steele et al. 2014, section 3, over the three numbers)."""
    mixed = draw & _MASK
    for part in (micro, layer):
        mixed = (mixed + (part + 1) * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1


def seed_generators(seed: int) -> None:
    """torch's default generators of the CPU and of the current GPU, if one is in use.

    As torch.manual_seed, which takes a stack trace for every kind of accelerator that is not in use: a millisecond, at
    every layer of every micro-batch.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


@contextmanager
def random_kept(device: torch.device) -> Iterator[None]:
    """Afterwards torch's default generators of the CPU and of `device` are as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
