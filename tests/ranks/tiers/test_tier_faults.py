"""A disk that fails: never a wrong weight, never a hang, always a named error, on every rank alike."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trilithon
from trilithon.engine.engine import Engine
from trilithon.errors import ConfigError, TierError
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import rank_part, vector_batches

BATCHES = vector_batches(6, 4)


def engine_on(folder: Path, zero_stage: int, kind: str = "adamw", width: int = 16, **offload: Any) -> Engine:
    disk = {"state": "disk", "path": str(folder), "sub_group_numel": 192} | offload
    config = {"zero": {"stage": zero_stage}, "optimizer": {"kind": kind, "lr": 1e-2}, "offload": disk}
    return trilithon.initialize(MLP(width=width), {**config, "precision": "bf16"})


def train(engine: Engine, steps: int, first: int = 0) -> None:
    for (batch,) in BATCHES[first : first + steps]:
        engine.train_step([rank_part(batch, engine.rank, engine.world_size)])


def failing(call: Callable[..., int], code: int, after: int = 0) -> Callable[..., int]:
    """`os.preadv` or `os.pwritev` that fails from its call number `after` on."""
    calls = [0]

    def run(descriptor: int, views: Any, offset: int) -> int:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(code, os.strerror(code))
        return call(descriptor, views, offset)

    return run


def refused_everywhere(engine: Engine) -> None:
    """After a failure in the middle of an update nothing of the engine can be used, so no torn weight is seen."""
    uses: list[Callable[[], object]] = [
        lambda: train(engine, 1),
        lambda: list(engine.full_parameters()),
        lambda: list(engine.view("master")),
        engine.state_dict,
        lambda: engine.eval_step(rank_part(BATCHES[0][0], engine.rank, engine.world_size)),
    ]
    for use in uses:
        with pytest.raises(TierError):
            use()


@ranks(2)
@pytest.mark.parametrize("kind", ["adamw", "lamb"])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_failing_disk_on_one_rank_ends_the_step_on_all(tmp_path, zero_stage, kind):
    """EIO while reading: at the first slice of a step, and at a later one, when gathers are already under way."""
    for after in (0, 2):
        engine = engine_on(tmp_path, zero_stage, kind, sub_group_numel=64)
        train(engine, 2)
        real = os.preadv
        if engine.rank == 1:
            os.preadv = failing(real, errno.EIO, after)
        try:
            with pytest.raises(TierError, match=r"updating state failed on 1 of 2 ranks. rank 1: read of .* EIO"):
                train(engine, 1, first=2)
        finally:
            os.preadv = real
        assert engine.steps == 2
        refused_everywhere(engine)
        engine.close()
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@ranks(2)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_write_that_failed_behind_reaches_the_step_that_needs_it(tmp_path, code):
    """The writes of a step run on behind it; what they could not write, the next step cannot read."""
    engine = engine_on(tmp_path, 2)
    train(engine, 1)
    real = os.pwritev
    if engine.rank == 0:
        os.pwritev = failing(real, code, after=1)
    try:
        with pytest.raises(TierError, match=f"on 1 of 2 ranks. rank 0: write of .* {errno.errorcode[code]}"):
            for step in range(1, 4):
                train(engine, 1, first=step)
        assert engine.steps <= 2, "the step after the failed write was made"
    finally:
        os.pwritev = real
    refused_everywhere(engine)
    engine.close()


@ranks(2)
def test_reading_whole_tensors_fails_on_all_ranks_alike(tmp_path):
    engine = engine_on(tmp_path, 3, sub_group_numel=64)  # more slices than are read ahead for the next step
    train(engine, 1)
    real = os.preadv
    if engine.rank == 1:
        os.preadv = failing(real, errno.EIO)
    try:
        with pytest.raises(TierError, match="reading state failed on 1 of 2 ranks"):
            list(engine.full_parameters())
    finally:
        os.preadv = real
    engine.close()


@ranks(2)
def test_short_reads_and_writes_change_nothing(tmp_path):
    def run() -> list[torch.Tensor]:
        engine = engine_on(tmp_path, 2)
        train(engine, 4)
        found = [tensor for _, tensor in engine.full_parameters()]
        engine.close()
        return found

    expected = run()
    read, write = os.preadv, os.pwritev
    os.preadv = lambda descriptor, views, offset: read(descriptor, [views[0][:4096]], offset)
    os.pwritev = lambda descriptor, views, offset: write(descriptor, [views[0][:4096]], offset)
    try:
        assert all(torch.equal(one, other) for one, other in zip(expected, run(), strict=True))
    finally:
        os.preadv, os.pwritev = read, write


@ranks(2)
def test_a_folder_or_a_disk_that_does_not_do_is_refused_before_training_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    for path, reason in (("file", "Not a directory"), ("no/where", "the folder '.*no' does not exist. Make it, or")):
        with pytest.raises(ConfigError, match=rf"rank 0: offload\.path='.*{path}' cannot be used: {reason}.*ame a fol"):
            engine_on(tmp_path / path, 2)
        with pytest.raises(ConfigError, match=rf"rank 1: offload\.path='.*{path}' cannot be used: {reason}.*ame a fol"):
            engine_on(tmp_path / path, 3, state="device", parameters="disk")
    if Path("/proc").exists():  # where nobody can make a folder, though it has "no space" either
        with pytest.raises(
            ConfigError, match=r"rank 0: offload\.path='/proc/foo' cannot be used: No such file.*Name a"
        ):
            engine_on(Path("/proc/foo"), 2)
        with pytest.raises(ConfigError, match=r"rank 0: offload\.path='/proc' cannot be used: .*Name a folder"):
            engine_on(Path("/proc"), 2)
    real = os.posix_fallocate
    if dist.get_rank() == 1:
        os.posix_fallocate = failing(real, errno.ENOSPC)
    try:
        with pytest.raises(ConfigError, match=r"rank 1: \d+ bytes for state cannot be had in .*No space left"):
            engine_on(tmp_path / "disk", 2)
    finally:
        os.posix_fallocate = real
    from trilithon.engine import state_tier

    free = state_tier.free_bytes
    state_tier.free_bytes = lambda path: 1000
    try:
        with pytest.raises(ConfigError, match=r"too little space: \d+ bytes of state on .* and 1000 bytes free"):
            engine_on(tmp_path / "disk", 2)
    finally:
        state_tier.free_bytes = free
    available = state_tier.available_host_bytes
    state_tier.available_host_bytes = lambda: 1000
    try:
        with pytest.raises(ConfigError, match=r"needs \d+ bytes of host memory per rank .* and 1000 are available"):
            trilithon.initialize(
                MLP(), {"zero": {"stage": 2}, "optimizer": {"kind": "adamw"}, "offload": {"state": "host"}}
            )
    finally:
        state_tier.available_host_bytes = available
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@ranks(2)
@pytest.mark.parametrize(
    "offload",
    [
        {},
        {"delayed_update": True, "delay_after_steps": 1},
        {"ratio": 0.5},
        {"parameters": "disk", "gradients": "disk"},
        {"state": "device", "parameters": "disk"},
    ],
    ids=lambda offload: "-".join(offload) or "state",
)
def test_an_error_inside_the_context_removes_the_files_of_the_rank_that_met_it(tmp_path, offload):
    """Without a collective: rank 1 goes on training and closes as ever."""
    path, engine = tmp_path / "disk", engine_on(tmp_path / "disk", 3, **offload)
    train(engine, 3)
    mine = f"-{os.getpid()}-"
    if engine.rank == 0:
        with pytest.raises(ZeroDivisionError), engine:
            raise ZeroDivisionError
        assert not [found for found in path.iterdir() if mine in found.name]
        assert not [thread for thread in threading.enumerate() if "trilithon-d" in thread.name], "disk and delay"
        with pytest.raises(TierError, match=r"removed.*(go on|checkpoint)"):
            engine.eval_step(BATCHES[0][0])
    else:
        assert [found for found in path.iterdir() if mine in found.name]
    dist.barrier()
    engine.close()
    engine.close()
    dist.barrier()
    assert not list(tmp_path.iterdir())


@ranks(1)
def test_an_engine_in_memory_can_be_saved_after_an_error(tmp_path):
    config = {"zero": {"stage": 2}, "optimizer": {"kind": "adamw"}, "offload": {"state": "host"}}
    with pytest.raises(ZeroDivisionError), trilithon.initialize(MLP(), config) as engine:
        raise ZeroDivisionError
    train(engine, 1)
    engine.save(tmp_path)
    engine.close()


@ranks(1, timeout_s=90)
def test_fifty_engines_leave_no_memory_no_files_and_no_threads(tmp_path):
    def life() -> tuple[int, int]:
        engine = engine_on(tmp_path, 2)
        train(engine, 1)
        engine.close()
        gc.collect()
        return len(os.listdir("/proc/self/fd")), mapped_bytes()

    for _ in range(3):
        life()
    first = life()
    counts = [life() for _ in range(46)]
    # gloo's sockets close a moment after their group, so the count of one moment may be a few above another's
    assert min(fds for fds, _ in counts[-10:]) <= first[0] + 2, (first, counts[-10:])
    assert counts[-1][1] - first[1] < 2 << 20, (first, counts[-10:])
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


def mapped_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
