"""The `ranks` decorator, and what is left when the process that runs pytest goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trilithon.testing import ranks
from warm_python import python


@ranks(1, 2, 3)
def test_the_body_runs_once_per_world_size(world_size):
    assert (dist.get_world_size(), int(os.environ["WORLD_SIZE"])) == (world_size, world_size)


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 5])
def test_parameters_of_pytest_reach_the_body(dtype, numel):
    value = torch.ones(numel, dtype=dtype)
    dist.all_reduce(value)
    assert torch.equal(value, torch.full((numel,), 2, dtype=dtype))


@pytest.mark.parametrize("start", [3])
@ranks(2)
def test_fixtures_reach_the_body(tmp_path, start, world_size):
    (tmp_path / str(dist.get_rank())).write_text(str(start))
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(rank) for rank in range(world_size)]


@ranks(2, init=False, env={"TRILITHON_TEST_SETTING": "on"})
def test_options_reach_the_ranks():
    assert not dist.is_initialized()
    assert os.environ["TRILITHON_TEST_SETTING"] == "on"


def test_no_world_size_or_a_method_is_refused_at_decoration():
    with pytest.raises(ValueError, match="names no number of ranks"):
        ranks()

    def nested():
        pass

    with pytest.raises(TypeError, match="top level of a module"):
        ranks(2)(nested)


FAILING = """
import torch.distributed as dist
from trilithon.testing import ranks
from warm_python import python

@ranks(2)
def test_rank_one_disagrees():
    assert dist.get_rank() == 0, "I am not rank 0"
"""

HANGING = """
import os, pathlib, time
import torch.distributed as dist
from trilithon.testing import ranks
from warm_python import python

@ranks(2, timeout_s=100)
def test_hangs(tmp_path):
    folder = pathlib.Path(os.environ["PIDS"])
    (folder / str(os.getpid())).touch()
    (folder / str(os.getppid())).touch()
    time.sleep(100)
"""


def start_pytest(folder: Path, source: str, **env: str) -> subprocess.Popen:
    path = folder / "test_inner_ranks.py"
    path.write_text(source)
    command = [python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(path)]
    path_of_source = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path_of_source, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_a_failing_rank_fails_the_pytest_run_and_names_itself(tmp_path):
    inner = start_pytest(tmp_path, FAILING)
    output, _ = inner.communicate(timeout=60)
    assert inner.returncode == 1
    assert "rank 1 of 2 failed first: AssertionError: I am not rank 0" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_pytest_is_interrupted_or_killed(tmp_path, number):
    pids = tmp_path / "pids"
    pids.mkdir()
    inner = start_pytest(tmp_path, HANGING, PIDS=str(pids))
    try:
        wait_for(lambda: len(list(pids.iterdir())) == 3, 60)  # two ranks and the server
        started = [int(path.name) for path in pids.iterdir()]
        inner.send_signal(number)
        inner.communicate(timeout=30)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), 10)
    finally:
        inner.kill()


def wait_for(holds, limit_s: float) -> None:
    ends_at = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < ends_at, f"still waiting after {limit_s} s"
        time.sleep(0.02)
