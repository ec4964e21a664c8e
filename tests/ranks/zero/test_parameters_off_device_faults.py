"""A disk that fails under parameters or gradients: a named error on every rank, and never a wrong weight."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import trilithon
from trilithon.errors import TierError
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import vector_batches

X, TARGET = vector_batches(1, 2)[0][0]


def engine_on_disk(folder: Path, **offload: object) -> trilithon.Engine:
    config = {
        "zero": {"stage": 3, "bucket_numel": 1},
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "offload": {"parameters": "disk", "path": str(folder), "direct": False, **offload},
    }
    engine = trilithon.initialize(MLP(), config)
    engine.backward(engine(X, TARGET))
    engine.step()
    return engine


@contextmanager
def failing(call: str, code: int, *, on_rank: int) -> Iterator[None]:
    """On one rank every such request fails."""
    before = getattr(os, call)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    if dist.get_rank() == on_rank:
        setattr(os, call, fail)
    try:
        yield
    finally:
        setattr(os, call, before)


def ends_clean(engine: trilithon.Engine, folder: Path) -> None:
    engine.close()
    dist.barrier()
    assert not os.listdir(folder)


@ranks(2)
def test_a_failed_read_in_training_is_raised_by_the_step_on_all_ranks(world_size: int, tmp_path: Path):
    engine = engine_on_disk(tmp_path)
    with failing("preadv", errno.EIO, on_rank=1):
        engine.backward(engine(X, TARGET))
        with pytest.raises(TierError, match=r"failed on 1 of 2 ranks. rank 1: .*read.*Input/output error"):
            engine.step()
    assert engine.steps == 1
    ends_clean(engine, tmp_path)


@ranks(2)
def test_without_gradients_the_forward_itself_raises_on_all_ranks(world_size: int, tmp_path: Path):
    for use in ("eval", "gathered", "whole"):
        engine = engine_on_disk(tmp_path)
        with failing("preadv", errno.EIO, on_rank=0):
            with pytest.raises(TierError, match=r"Input/output error|another rank could not read"):
                if use == "eval":
                    engine.eval_step((X, TARGET))
                elif use == "gathered":
                    with trilithon.zero.gathered(engine.module.last.weight):
                        pass
                else:
                    dict(engine.view("param"))
        ends_clean(engine, tmp_path)


@ranks(2)
def test_a_full_disk_is_told_by_the_step_whose_values_it_lost(world_size: int, tmp_path: Path):
    engine = engine_on_disk(tmp_path, gradients="device")
    with failing("pwritev", errno.ENOSPC, on_rank=1):
        engine.backward(engine(X, TARGET))
        with pytest.raises(TierError, match=r"rank 1: .*No space left on device"):
            engine.step()  # or, if the write was still under way ...
            engine.backward(engine(X, TARGET))
            engine.step()  # ... the next one
    ends_clean(engine, tmp_path)


@ranks(2)
def test_a_gradient_that_could_not_be_kept_is_told_before_the_update(world_size: int, tmp_path: Path):
    engine = engine_on_disk(tmp_path, parameters="device", gradients="disk")
    before = dict(engine.full_parameters())
    with failing("pwritev", errno.EIO, on_rank=0):
        engine.backward(engine(X, TARGET))
        with pytest.raises(TierError, match=r"rank 0: .*Input/output error"):
            engine.step()
            pytest.fail("the update read a gradient that was never written")
    assert engine.steps == 1
    assert all(torch.equal(value, value) for name, value in before.items())
    ends_clean(engine, tmp_path)


@ranks(2)
def test_an_unusable_folder_is_refused_on_all_ranks_and_gives_the_model_back(world_size: int, tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    model = MLP()
    config = {
        "zero": {"stage": 3},
        "optimizer": {"kind": "adamw"},
        "offload": {"parameters": "disk", "path": str(file)},
    }
    with pytest.raises(trilithon.ConfigError, match=r"rank 0: .*rank 1: "):
        trilithon.initialize(model, config)
    assert torch.isfinite(model.last.weight).all()
