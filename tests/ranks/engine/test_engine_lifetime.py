"""Engines come and go in one process and leave nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import trilithon
from against_plain import STAGES, engine_for, train_engine
from trilithon.engine import memory
from trilithon.errors import ConfigError, ShardedParameterError
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import vector_batches
from trilithon.zero import gathered, init, sharded_parameter, sharding


def tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, nn.Parameter):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


def one_life(stage: int, sliced: bool) -> list[weakref.ref]:
    with init(enabled=sliced):
        model = MLP()
    engine = engine_for(model, stage, precision="bf16")
    train_engine(engine, vector_batches(2, 4))
    engine.eval_step((torch.ones(1, 16),))
    with gathered(model):
        pass
    engine.close()
    inner = engine._sharding
    return [weakref.ref(thing) for thing in (engine, inner, *inner.units, *inner._gradients, model)]


def falls_to(count: int, folder: str) -> bool:
    """gloo's own threads and sockets end a moment after their process group, how long depends on the machine's load."""
    give_up = time.monotonic() + 20
    while len(os.listdir(folder)) > count:
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


@ranks(2)
def test_ten_engines_in_one_process_leave_nothing_behind():
    for stage in STAGES:
        bytes_after, threads_after, files_after = [], [], []
        for turn in range(5):
            references = one_life(stage, sliced=turn % 2 == 0)
            bytes_after.append(tensor_bytes())
            threads_after.append(len(os.listdir("/proc/self/task")))
            files_after.append(len(os.listdir("/proc/self/fd")))
            alive = [type(reference()).__name__ for reference in references if reference() is not None]
            assert not alive, (stage, turn, alive)
        assert bytes_after[-1] <= bytes_after[0], (stage, bytes_after)
        names = [thread.name for thread in threading.enumerate()]
        least_threads, least_files = min(threads_after), min(files_after)
        assert falls_to(least_threads, "/proc/self/task"), (stage, threads_after, names)
        assert falls_to(least_files, "/proc/self/fd"), (stage, files_after)
        assert not sharding._RUNNING
        assert len(sharded_parameter._OWNERS) == len(sharded_parameter._CLASSES) == 0


@ranks(2)
def test_an_engine_that_was_never_closed_goes_away_with_its_model():
    for stage in STAGES:
        model = MLP()
        engine = engine_for(model, stage)
        train_engine(engine, vector_batches(1, 4))
        reference = weakref.ref(engine._sharding)
        del engine, model
        gc.collect()
        assert reference() is None, stage


@ranks(2)
def test_a_closed_model_goes_into_another_engine():
    """Stage by stage over the same model: masters are what was trained, hooks do not pile up."""
    model = MLP()
    for stage in (*STAGES, 3, 0):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine = engine_for(model, stage)
        assert all(torch.equal(before[name], value) for name, value in engine.full_parameters())
        train_engine(engine, vector_batches(1, 4))
        engine.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class ByNorm(torch.optim.Optimizer):
    """Divides each parameter's step by the norm of its gradient, which a slice does not know."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / (p.grad.norm() + 1e-3))


@ranks(2)
def test_a_refused_optimizer_leaves_an_ordinary_model():
    for stage in (1, 2, 3):
        model = MLP()
        with pytest.raises(ConfigError):
            trilithon.initialize(model, {"zero": {"stage": stage, "bucket_numel": 1}}, ByNorm(model.parameters()))
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), MLP().parameters(), strict=True))
        model(torch.ones(1, 16)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@ranks(2)
def test_close_gives_back_if_every_rank_has_room():
    """Ten parameters of four bytes: at stage 3 more than 80 bytes have to be free; below it nothing is cut."""
    for stage, scarce, whole in ((3, 81, True), (3, 80, False), (2, 0, True)):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        engine = trilithon.initialize(model, {"optimizer": {"kind": "sgd", "lr": 0.1}, "zero": {"stage": stage}})
        values = engine.state_dict()
        free = scarce if engine.rank == 1 else 1000
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "available_host_bytes", lambda free=free: free)
            engine.close(give_back=None)
        if whole:
            assert torch.equal(model.weight, values["weight"])
        else:
            with pytest.raises(ShardedParameterError, match="the engine that held the slices"):
                model.weight.sum()
