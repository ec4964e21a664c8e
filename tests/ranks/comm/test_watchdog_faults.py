"""Planted faults on three ranks: the table must name the right rank, module and parameter, and every rank must end."""

import atexit
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from trilithon.comm.collectives import Group
from trilithon.comm.mesh import rendezvous_store
from trilithon.comm.watchdog import EXIT_STATUS, Watchdog
from trilithon.contracts import Tag
from trilithon.testing import run_ranks, run_ranks_raw
from warm_python import python

LIMIT_S = 2.0
WORLD_SIZE = 3
BUSY_S = 15  # what a machine may add that is busy with other things


class PlantedError(Exception):
    pass


def pretend_to_read_data():
    time.sleep(60)


def train(fault, limit_s):
    """Three modules, four steps; in the third step rank 1 does something else."""
    rank = dist.get_rank()
    watchdog = Watchdog(limit_s, rendezvous_store(), rank, WORLD_SIZE)
    gathers = Group(dist.new_group(), name="gathers", watchdog=watchdog)
    reductions = Group(dist.new_group(), name="reductions", watchdog=watchdog)

    def tag(module, step):
        return Tag(module, (f"{module}.weight", f"{module}.bias"), step, 0)

    def gather(module, step, numel=8):
        gathers.all_gather(torch.zeros(WORLD_SIZE * numel), torch.ones(numel), tag(module, step)).wait()

    for step in range(4):
        bad = rank == 1 and step == 2
        if step == 2:
            print(f"third step at {time.monotonic()}", flush=True)
        if bad and fault == "leaves":
            return
        if bad and fault == "raises":
            raise PlantedError("a planted fault")
        if bad and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if bad and fault == "late":
            pretend_to_read_data()
        if bad and fault == "alone":
            gather("extra", step)
        modules = ["blocks.0", "blocks.1", "blocks.2"]
        if bad and fault == "skips":
            modules.remove("blocks.1")
        if bad and fault == "reorders":
            modules = ["blocks.0", "blocks.2", "blocks.1"]
        for module in modules:
            gather(module, step, numel=4 if bad and fault == "size" and module == "blocks.1" else 8)
        reductions.reduce_scatter(torch.ones(WORLD_SIZE * 8), torch.empty(8), tag("blocks.0", step)).wait()
    watchdog.close()


def as_a_program(fault, limit_s=LIMIT_S):
    """Run `train` and end like an interpreter does, which a rank of a test otherwise does not."""
    status = 0
    try:
        train(fault, limit_s)
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def ends_of(fault, limit_s=LIMIT_S):
    """Exit statuses, what was said, and seconds from the first rank's third step until every rank has ended."""
    results = run_ranks_raw(as_a_program, WORLD_SIZE, fault, limit_s, timeout_s=60)
    said = "".join(result.output for result in results)
    began = min(float(at) for at in re.findall(r"third step at ([0-9.]+)", said))
    return [result.exit_code for result in results], said, time.monotonic() - began


FIRST = "missing: rank 1, in all_gather for module blocks.0 (blocks.0.weight, blocks.0.bias)"
SECOND = "missing: rank 1, in all_gather for module blocks.1 (blocks.1.weight, blocks.1.bias)"


@pytest.mark.parametrize(
    ("fault", "missing", "cause", "own_status"),
    [
        ("skips", SECOND, "rank 1 skipped blocks.1", EXIT_STATUS),
        ("leaves", FIRST, "rank 1 left early", 0),
        ("raises", FIRST, "rank 1 raised PlantedError: a planted fault at test_watchdog_faults.py:", 1),
        ("reorders", SECOND, "it is in all_gather of 24 float32 for blocks.2", EXIT_STATUS),
        ("alone", FIRST, "rank 1 made a call that no other rank made", EXIT_STATUS),
        ("late", FIRST, "in pretend_to_read_data", EXIT_STATUS),
        ("killed", FIRST, "rank 1 ended without a word", -signal.SIGKILL),
        ("size", SECOND, "rank 1 has another size or dtype", EXIT_STATUS),
    ],
)
def test_a_planted_fault_is_named_once_and_every_rank_ends(fault, missing, cause, own_status):
    statuses, said, seconds = ends_of(fault)
    assert statuses == [EXIT_STATUS, own_status, EXIT_STATUS]
    assert said.count("trilithon: rank") == 1, said
    assert missing in said
    assert cause in said
    # the limit, 1 s until an idle rank looks, 2.5 s for the answer of a rank that is gone; the rest is for ending
    assert seconds < LIMIT_S + 3.5 + BUSY_S


def test_without_a_fault_nobody_is_accused():
    statuses, said, _ = ends_of("none")
    assert statuses == [0, 0, 0]
    assert "trilithon" not in said


def slow_stages():
    """What stages of a pipeline do, with nobody beside them: calls of their own, and waits of more than a second."""
    rank = dist.get_rank()
    watchdog = Watchdog(60.0, rendezvous_store(), rank, 2)
    alone = Group(None, name="gather", watchdog=watchdog)
    together = Group(dist.new_group(), name="pipe", watchdog=watchdog)
    alone.broadcast(torch.zeros(8 + rank), 0, Tag("bucket.0")).wait()
    for late in (1, 0, 1):
        time.sleep(1.7 if rank == late else 0.0)
        together.all_reduce(torch.ones(1), Tag("loss")).wait()
    watchdog.close()
    return rank


def test_what_ranks_do_in_groups_of_their_own_may_differ():
    assert run_ranks(slow_stages, 2, timeout_s=30) == [0, 1]


def test_calls_that_differ_do_not_wait_for_a_long_limit():
    statuses, said, seconds = ends_of("skips", limit_s=600.0)
    assert statuses == [EXIT_STATUS] * 3
    assert SECOND in said
    assert seconds < 3.5 + BUSY_S


def test_under_torchrun_the_rank_that_raised_is_the_root_cause(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist
            from trilithon.comm.collectives import Group
            from trilithon.comm.mesh import init_distributed, rendezvous_store
            from trilithon.comm.watchdog import Watchdog
            from trilithon.contracts import Tag

            assert init_distributed(timeout_s=30)
            watchdog = Watchdog(20.0, rendezvous_store(), dist.get_rank(), 2)
            group = Group(dist.group.WORLD, name="data", watchdog=watchdog)
            if group.rank == 1:
                raise ValueError("planted")
            group.all_gather(torch.zeros(2), torch.zeros(1), Tag("net", ("net.weight",))).wait()
            """
        )
    )
    launch = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(launch, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "missing: rank 1, in all_gather for module net (net.weight)" in ended.stderr
    root_cause = ended.stderr[ended.stderr.index("Root Cause") :]
    assert "rank      : 1" in root_cause
    assert "exitcode  : 1 " in root_cause
