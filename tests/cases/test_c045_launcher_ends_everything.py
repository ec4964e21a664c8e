"""C045: the launcher returns the failing rank's status, ends every other process and shows the cause last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

NOTE_PID = """
import os, sys, time, pathlib
folder = pathlib.Path(sys.argv[1])
rank = int(os.environ["RANK"])
(folder / f"rank{rank}.pid").write_text(str(os.getpid()))
def wait_for(n):
    while len(list(folder.glob("rank*.pid"))) < n:
        time.sleep(0.01)
"""

IN_A_COLLECTIVE = (
    NOTE_PID
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
if rank == 1:
    time.sleep(1)
    print("about to fail", file=sys.stderr)
    raise ValueError("boom on rank one")
dist.barrier()
"""
)

SLEEPERS = (
    NOTE_PID
    + """
wait_for(3)
(folder / f"ready{rank}").touch()
time.sleep(120)
"""
)

DEAF = (
    NOTE_PID
    + """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
(folder / f"deaf{rank}").touch()
wait_for(3)
while len(list(folder.glob("deaf*"))) < 3:
    time.sleep(0.01)
if rank == 1:
    sys.exit(7)
time.sleep(120)
"""
)

WITH_GRANDCHILD = (
    NOTE_PID
    + """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
(folder / f"grandchild{rank}.tmp").write_text(str(child.pid))
os.rename(folder / f"grandchild{rank}.tmp", folder / f"grandchild{rank}.pid")
while len(list(folder.glob("grandchild*.pid"))) < 2:
    time.sleep(0.01)
if rank == 1:
    os._exit(5)
time.sleep(120)
"""
)


GRACE_S = 5  # which ranks have by default
BUSY_S = 20  # what a machine may add that is busy with other things


def start(folder: Path, script: str, *options: str, nproc: int = 3) -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(script)
    launch = [sys.executable, "-m", "trilithon.cli.main", "launch", "--nproc", str(nproc), *options]
    command = [*launch, str(path), str(folder)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def noted_pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("*.pid")]


def wait_until(condition, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the script did not get going"
        time.sleep(0.02)


def test_a_failing_rank_ends_the_others_and_its_traceback_is_last(tmp_path):
    launcher = start(tmp_path, IN_A_COLLECTIVE)
    _, stderr = launcher.communicate(timeout=50)
    assert launcher.returncode == 1
    lines = stderr.rstrip().splitlines()
    assert lines[-1] == "ValueError: boom on rank one"
    last = stderr.rindex("Traceback (most recent call last)")
    assert "rank 1 on localhost" in stderr[:last].splitlines()[-1]
    assert 'raise ValueError("boom on rank one")' in stderr[last:]
    pids = noted_pids(tmp_path)
    assert len(pids) == 3 and not any(alive(pid) for pid in pids)


def test_the_time_from_failure_to_the_end_is_bounded_even_if_ranks_ignore_signals(tmp_path):
    launcher = start(tmp_path, DEAF)
    wait_until(lambda: len(list(tmp_path.glob("deaf*"))) == 3)
    launcher.communicate(timeout=GRACE_S + BUSY_S)
    assert launcher.returncode == 7
    assert not any(alive(pid) for pid in noted_pids(tmp_path))


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_all_children(tmp_path, number, status):
    launcher = start(tmp_path, SLEEPERS)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 3)
    launcher.send_signal(number)
    launcher.communicate(timeout=GRACE_S + BUSY_S)
    assert launcher.returncode == status
    pids = noted_pids(tmp_path)
    assert len(pids) == 3 and not any(alive(pid) for pid in pids)


def test_a_second_interrupt_does_not_leave_orphans(tmp_path):
    launcher = start(tmp_path, DEAF.replace("sys.exit(7)", "time.sleep(120)"), "--grace", "100")
    wait_until(lambda: len(list(tmp_path.glob("deaf*"))) == 3)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=BUSY_S)  # the second one does not wait for the grace time
    assert launcher.returncode == 130
    assert not any(alive(pid) for pid in noted_pids(tmp_path))


def test_even_a_killed_launcher_leaves_no_orphan(tmp_path):
    launcher = start(tmp_path, SLEEPERS)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 3)
    launcher.kill()
    launcher.communicate(timeout=10)
    wait_until(lambda: not any(alive(pid) for pid in noted_pids(tmp_path)), timeout_s=BUSY_S)


def test_what_a_rank_started_is_ended_with_it(tmp_path):
    launcher = start(tmp_path, WITH_GRANDCHILD, nproc=2)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 5
    pids = noted_pids(tmp_path)
    assert len(pids) == 4
    wait_until(lambda: not any(alive(pid) for pid in pids), timeout_s=BUSY_S)  # orphans are reaped by init, not by us


def test_a_missing_script_is_refused_before_anything_starts(tmp_path):
    command = [sys.executable, "-m", "trilithon.cli.main", "launch", "--nproc", "3", str(tmp_path / "nowhere.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert "nowhere.py does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_rank_that_was_killed_is_named_not_the_ones_that_followed(tmp_path):
    script = (
        NOTE_PID
        + """
wait_for(2)
if rank == 1:
    os.kill(os.getpid(), 9)
while os.path.exists(f"/proc/{(folder / 'rank1.pid').read_text()}/fd"):
    try:
        os.listdir(f"/proc/{(folder / 'rank1.pid').read_text()}/fd")
    except OSError:
        break
raise RuntimeError("connection closed by peer")
"""
    )
    launcher = start(tmp_path, script, nproc=2)
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + 9
    summary = next(line for line in stderr.splitlines() if line.startswith("trilithon launch:"))
    assert "rank 1" in summary and "SIGKILL" in summary


def test_the_exit_message_of_a_script_is_kept(tmp_path):
    launcher = start(tmp_path, "import sys; sys.exit('no data in the folder')", nproc=1)
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert stderr.rstrip().endswith("no data in the folder")


def test_success_is_zero_and_silent(tmp_path):
    launcher = start(tmp_path, NOTE_PID, nproc=2)
    _, stderr = launcher.communicate(timeout=30)
    assert (launcher.returncode, stderr) == (0, "")
    assert json.dumps(sorted(os.listdir(tmp_path))) == json.dumps(["rank0.pid", "rank1.pid", "script.py"])
