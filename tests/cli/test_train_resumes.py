"""`trilithon train` under its launcher and under torchrun: signals, kills, restarts, fewer ranks."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from train_processes import SMALL, end, ranks_of, start, wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
EVERY_STEP = ("--set", "monitor.every=1", "--eval-every", 0)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "a.txt").write_text("some text to learn from, again and again.\n" * 200)
    return tmp_path / "a.txt"


def newest(out: Path) -> int:
    """The step of the latest checkpoint, 0 while there is none."""
    try:
        return int((out / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    except OSError:
        return 0


def recorded(out: Path) -> list[int]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


def test_signals_to_the_launcher_save_stop_and_the_run_continues(text, tmp_path):
    out = tmp_path / "out"
    common = ("--cache", tmp_path / "c", *SMALL, *EVERY_STEP, "-n", 2, "-z", 3)
    process = start("-d", text, "--out", out, *common, "--steps", 100_000, "--schedule", "constant")
    wait_until(lambda: (out / "metrics.jsonl").exists() and recorded(out) != [], process, "no step")
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: newest(out) > 0, process, "no checkpoint after SIGUSR1")
    asked = newest(out)
    wait_until(lambda: recorded(out)[-1] > asked + 2, process, "the run did not go on after SIGUSR1")
    process.send_signal(signal.SIGTERM)
    status, printed, err = end(process, limit_s=60)
    assert status == 143 and err == "", err
    stopped = newest(out)
    assert stopped > asked and f"Stopped after step {stopped} as asked." in printed
    assert f"trilithon train --resume {out}" in printed
    status, printed, err = end(start("--resume", out, "-n", 2, "--steps", stopped + 3))
    assert status == 0, err
    assert f"Continuing after step {stopped}" in printed and f"step {stopped + 3}/{stopped + 3}" in printed
    assert recorded(out) == list(range(1, stopped + 4))


def test_a_killed_rank_leads_to_a_restart_from_the_last_checkpoint(text, tmp_path):
    out = tmp_path / "out"
    process = start(
        *("-d", text, "--out", out, "--cache", tmp_path / "c", *SMALL, *EVERY_STEP, "-n", 2, "-z", 2),
        *("--steps", 100_000, "--save-every", 5, "--max-restarts", 1),
        cold=True,
    )
    wait_until(lambda: newest(out) > 0, process, "no checkpoint")
    first = ranks_of(process.pid)
    os.kill(first[1], signal.SIGKILL)
    wait_until(lambda: len(set(ranks_of(process.pid)) - set(first)) == 2, process, "no restart")
    at = newest(out)
    wait_until(lambda: newest(out) > at + 5, process, "no checkpoint after the restart")
    process.send_signal(signal.SIGINT)
    status, printed, err = end(process, limit_s=60)
    assert status == 130, err
    assert "Start 2 of these ranks, after a failure." in printed
    continued = int(re.search(r"Continuing after step (\d+)", printed)[1])
    assert continued > 0 and continued % 5 == 0
    assert recorded(out) == list(range(1, recorded(out)[-1] + 1)), "every step once"


def node(run: Path, port: int, *arguments: object, hosts: bool) -> subprocess.Popen[str]:
    """One machine of an elastic job of one or two, with one rank. hosts: the others meet there."""
    conf = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
    conf += f",is_host={str(hosts).lower()}"
    torchrun = (
        *("torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "elastic"),
        *("--rdzv-conf", conf, "--local-addr", "localhost", "-m"),
    )
    return start(*arguments, launcher=torchrun, cold=True)


def test_an_elastic_job_goes_on_with_fewer_ranks_and_the_same_batch(text, tmp_path, free_port):
    out = tmp_path / "out"
    arguments = (
        *("-d", text, "--out", out, "--cache", tmp_path / "c", *SMALL, *EVERY_STEP, "-z", 2, "--resume"),
        *("--steps", 100_000, "--save-every", 5),
    )
    first = node(out, free_port, *arguments, hosts=True)  # the machine that stays
    second = node(out, free_port, *arguments, hosts=False)
    try:
        wait_until(lambda: ranks_of(second.pid, "train") != [], second, "the second machine has no rank")
        at = newest(out)  # of the first alone, if it did not wait for the second
        wait_until(lambda: newest(out) > at + 5, first, "no checkpoint of two")
        lost = ranks_of(second.pid, "train")
        second.kill()
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        at = newest(out)
        wait_until(lambda: newest(out) > at + 5, first, "no checkpoint after a machine was lost")
        first.send_signal(signal.SIGTERM)
        _, printed, err = end(first, limit_s=60)
    finally:
        first.kill()
        second.kill()
    found = re.search(r"Continuing after step (\d+) of .*, which ran on 2: 4 sequences a step as 2 x 2", printed)
    assert found is not None, (printed, err)
    continued = int(found[1])
    assert continued > 0 and newest(out) > continued
    assert recorded(out) == list(range(1, recorded(out)[-1] + 1)), "every step once"
