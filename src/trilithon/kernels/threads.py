"""A compiled elementwise loop spread over torch's threads, each with one contiguous run of the elements.

Loops release Python's global lock. Results do not depend on the number of threads, as they do not on any cut. With one
thread, as training sets it for each rank on a shared machine, no thread is ever started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from trilithon.kernels.compiled import Array

# Handing work to a thread costs tens of microseconds; a run of this length takes about a millisecond.
MIN_NUMEL_PER_THREAD = 1 << 19


def spread(loop: Callable[..., Any], arrays: Sequence[Array | None], scalars: Sequence[float | bool]) -> None:
    """loop(*arrays, *scalars), all arrays [n] or None, over up to torch.get_num_threads() threads."""
    numel = next(array.shape[0] for array in arrays if array is not None)
    threads = min(torch.get_num_threads(), numel // MIN_NUMEL_PER_THREAD)
    if threads <= 1:
        loop(*arrays, *scalars)
        return
    cuts = [numel * index // threads for index in range(threads + 1)]
    runs = [[None if array is None else array[start:stop] for array in arrays] for start, stop in pairwise(cuts)]
    others = [_pool(os.getpid()).submit(loop, *run, *scalars) for run in runs[1:]]
    try:
        loop(*runs[0], *scalars)
    finally:
        for other in others:
            other.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """One for each process: threads do not survive a fork."""
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="trilithon-kernel")
