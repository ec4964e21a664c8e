"""What holds for every test: one thread, the same seeds, and no process group left over from the test before."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported below

import numpy as np
import pytest
import torch
import torch.distributed as dist

# Tests of programs that start, stop and kill processes against the clock: these alone are run once more when they fail.
# Never numerics, sharding, collectives or hangs in training: there, a failure that comes and goes is a fault.
AGAINST_THE_CLOCK = (
    "tests/ranks/testing/",
    "tests/cli/",
    "tests/docs/",
    "tests/unit/test_benchmarks.py",
    "tests/unit/testing/test_warm_python.py",
    "tests/unit/launch/test_processes.py",
    "tests/cases/test_c045",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(AGAINST_THE_CLOCK):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(autouse=True)
def same_start_for_every_test() -> Iterator[None]:
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind; destroy it, or run the body on ranks")
