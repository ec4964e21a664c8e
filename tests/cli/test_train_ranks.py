import os
import signal
import sys
from pathlib import Path

import pytest
from train_processes import SMALL, end, gone, ranks_of, start, wait_for_records

from trilithon.pretrain.artifacts import load_model


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "a.txt").write_text("some text to learn from, again and again.\n" * 200)
    return tmp_path / "a.txt"


def test_nproc_starts_ranks_that_train_together(text, tmp_path):
    status, out, err = end(
        start("-d", text, "--out", tmp_path / "out", "--cache", tmp_path / "c", *SMALL, "-n", 2, "-z", 3, "--steps", 3)
    )
    assert status == 0, err
    assert "on 2 ranks, ZeRO stage 3" in out and out.count("step 3/3") == 1 and "4 sequences of 32 tokens" in out
    assert (tmp_path / "out" / "model.pt").exists() and err == ""


def test_stages_by_a_flag_and_a_run_that_goes_on_without_them(text, tmp_path):
    out, flags = tmp_path / "out", ("--pp", 2, "--accumulation", 4, "--pipe-schedule", "1f1b")
    cache = ("--cache", tmp_path / "c")
    first = start("-d", text, "--out", out, *cache, *SMALL, "-n", 2, *flags, "--steps", 2, "--save-every", 2)
    status, told, err = end(first)
    assert status == 0, err
    assert "on 2 ranks" in told and "8 sequences of 32 tokens" in told and "step 2/2" in told
    assert "No sample is drawn from stages" in told
    model, _ = load_model(out)
    assert model.head.weight is model.embedding.weight
    status, told, err = end(start("--resume", out, "--pp", 1, "--steps", 3, *cache))
    assert status == 0, err
    assert "Continuing after step 2" in told and "step 3/3" in told


def test_experts_over_ranks_inside_stages_and_a_run_that_goes_on_without_either(text, tmp_path):
    out, cache = tmp_path / "out", ("--cache", tmp_path / "c")
    flags = ("--pp", 2, "--accumulation", 2, "--experts", 2, "--ep-size", 2)
    status, told, err = end(
        start("-d", text, "--out", out, *cache, *SMALL, "-n", 4, *flags, "--steps", 2, "--save-every", 2)
    )
    assert status == 0, err
    assert "step 2/2" in told and "8 sequences of 32 tokens" in told
    more = ("-n", 1, "--pp", 1, "--ep-size", 1, "--accumulation", 4, "--steps", 3)
    status, told, err = end(start("--resume", out, *more))
    assert status == 0, err
    assert "Continuing after step 2" in told and "step 3/3" in told


def test_a_compressed_rule_by_name(text, tmp_path):
    options = ("--optimizer", "onebit_adam", "--steps", 5, "--set", "optimizer.scale_norm=l1")
    status, out, err = end(start("-d", text, "--out", tmp_path / "o", *SMALL, "-n", 2, *options))
    assert status == 0, err
    assert "step 5/5" in out
    status, _, err = end(start("-d", text, "--out", tmp_path / "p", *SMALL, *options, "-z", 2))
    assert status == 1 and "optimizer onebit_adam needs whole local gradients" in err


def test_the_message_of_the_failing_rank_is_printed_once_and_its_status_returned(tmp_path):
    status, out, err = end(start("--data", tmp_path / "absent", "--out", tmp_path / "out", "--nproc", 2))
    assert status == 1 and out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"trilithon: {tmp_path}/absent does not exist. Give an existing file")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_rank_that_is_killed_ends_the_others_and_shows_in_the_status(text, tmp_path):
    out = tmp_path / "out"
    process = start(
        *("-d", text, "--out", out, "--cache", tmp_path / "c", *SMALL, "-n", 2, "--steps", 100_000),
        *("--set", "monitor.every=1"),
    )
    wait_for_records(out, process)
    pids = ranks_of(process.pid)
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    status, _, err = end(process, limit_s=15)
    assert status == 128 + signal.SIGKILL
    assert "was ended by SIGKILL" in err and err.count("\n") == 1
    assert gone(pids)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ctrl_c_ends_every_rank_after_the_step_with_status_130(text, tmp_path):
    out = tmp_path / "out"
    process = start(
        *("-d", text, "--out", out, "--cache", tmp_path / "c", *SMALL, "-n", 2, "-z", 3, "--steps", 100_000),
        *("--set", "monitor.every=1"),
    )
    wait_for_records(out, process)
    pids = ranks_of(process.pid)
    process.send_signal(signal.SIGINT)
    status, printed, err = end(process, limit_s=60)
    assert status == 130, err
    assert "Stopped after step" in printed and "Traceback" not in err
    assert gone(pids)
    assert (out / "model.pt").exists() and not list(out.glob("*partial*"))


def test_it_runs_under_torchrun_as_well(text, tmp_path):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    arguments = ("-d", text, "--out", tmp_path / "out", "--cache", tmp_path / "c", *SMALL, "--steps", 2)
    status, out, err = end(start(*arguments, launcher=torchrun))
    assert status == 0, err
    assert "on 2 ranks" in out and out.count("step 2/2") == 1
