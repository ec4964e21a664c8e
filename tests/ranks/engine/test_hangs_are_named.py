"""Training at stage 3 on three ranks, where one rank departs from the others: who, which module and why is printed."""

import atexit
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trilithon
from trilithon.comm.watchdog import EXIT_STATUS
from trilithon.engine.build import report_failure
from trilithon.testing import run_ranks_raw

LIMIT_S = 3.0
WORLD_SIZE = 3
WIDTH = 64


class Tower(nn.Module):
    """Three blocks that are gathered one by one. order: which of them forward runs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self.blocks[index](x))
        return x.square().mean()


def train(fault):
    torch.manual_seed(0)
    rank = dist.get_rank()
    config = {
        "zero": {"stage": 3, "unit_classes": ["Linear"], "overlap": False},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "comm": {"wait_limit_s": LIMIT_S},
    }
    model = Tower()
    engine = trilithon.initialize(model, config)
    for step in range(3):
        bad = rank == 1 and step == 2 and fault != "none"
        if bad and fault == "skips":
            model.order = [0, 2]
        if bad and fault == "reorders":
            model.order = [0, 2, 1]
        if bad and fault == "leaves":
            return
        if bad and fault == "raises":
            raise RuntimeError("a planted fault")
        if bad and fault == "alone":
            list(engine.full_parameters())
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()


def as_a_program(fault):
    status = 0
    try:
        train(fault)
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@pytest.mark.parametrize(
    ("fault", "module", "cause", "own_status"),
    [
        ("skips", "blocks.1", "skipped", EXIT_STATUS),
        ("reorders", "blocks.1", "blocks.2", EXIT_STATUS),
        ("leaves", "blocks.0", "left early", 0),
        ("raises", "blocks.0", "a planted fault", 1),
        ("alone", "blocks.0", "rank 1", EXIT_STATUS),
    ],
)
def test_the_departing_rank_its_module_and_the_cause_are_named(fault, module, cause, own_status):
    began = time.monotonic()
    results = run_ranks_raw(as_a_program, WORLD_SIZE, fault, timeout_s=40)
    said = "".join(result.output for result in results)
    assert [result.exit_code for result in results] == [EXIT_STATUS, own_status, EXIT_STATUS], said
    assert "missing: rank 1" in said
    assert f"{module}.weight" in said
    assert cause in said
    assert time.monotonic() - began < LIMIT_S + 15


def save_on_one_rank_only(folder):
    engine = trilithon.initialize(nn.Linear(2, 2), {"optimizer": "sgd", "comm": {"wait_limit_s": LIMIT_S}})
    if engine.rank == 0:
        engine.save(folder)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def test_a_save_by_one_rank_as_the_last_call_says_to_call_it_on_all(tmp_path):
    results = run_ranks_raw(save_on_one_rank_only, 2, tmp_path, timeout_s=40)
    said = "".join(result.output for result in results)
    assert [result.exit_code for result in results] == [EXIT_STATUS, 0], said
    assert "rank 1 left early" in said
    assert "Call engine.save on every rank" in said
    assert "uneven()" not in said


def catch_and_report():
    """A program that catches its own exceptions, as a trainer with one error page does."""
    try:
        train("raises")
        os._exit(0)
    except RuntimeError as error:
        report_failure(error)
        sys.stdout.flush()
        os._exit(1)


def test_an_exception_that_the_program_caught_is_told_as_one():
    results = run_ranks_raw(catch_and_report, WORLD_SIZE, timeout_s=40)
    said = "".join(result.output for result in results)
    assert [result.exit_code for result in results] == [EXIT_STATUS, 1, EXIT_STATUS], said
    assert "rank 1 raised RuntimeError: a planted fault" in said


def test_without_a_fault_nobody_is_accused():
    results = run_ranks_raw(as_a_program, WORLD_SIZE, "none", timeout_s=40)
    said = "".join(result.output for result in results)
    assert [result.exit_code for result in results] == [0, 0, 0], said
    assert "missing" not in said
