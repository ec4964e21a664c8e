from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from trilithon.errors import LaunchError
from trilithon.launch.processes import STUCK_AFTER_S, NodeProcesses


def start(tmp_path: Path, *bodies: str) -> NodeProcesses:
    commands = [[sys.executable, "-S", "-c", body] for body in bodies]
    records = [tmp_path / f"{index}.json" for index in range(len(bodies))]
    return NodeProcesses.start(commands, [dict(os.environ)] * len(bodies), records)


def wait_for_failure(processes: NodeProcesses):
    deadline = time.monotonic() + 20
    while (failure := processes.first_failure()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return failure


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_all_ended_well_is_no_failure(tmp_path):
    processes = start(tmp_path, "pass", "pass")
    while not processes.finished():
        time.sleep(0.01)
    assert processes.first_failure() is None
    pids = processes.pids.values()
    processes.reap()
    assert all(gone(pid) for pid in pids)


def test_exit_statuses_and_signals_are_told_as_a_shell_tells_them(tmp_path):
    processes = start(tmp_path, "raise SystemExit(143)")
    failure = wait_for_failure(processes)
    assert (failure.exit_status, failure.signal_name) == (143, None)
    processes.end(signal.SIGTERM, 1)
    processes = start(tmp_path, "import os; os.kill(os.getpid(), 11)")
    failure = wait_for_failure(processes)
    assert (failure.exit_status, failure.signal_name) == (139, "SIGSEGV")
    processes.end(signal.SIGTERM, 1)


def test_the_earliest_record_is_the_first_failure(tmp_path):
    processes = start(tmp_path, "raise SystemExit(1)", "raise SystemExit(2)", "raise SystemExit(3)")
    while not processes.finished():
        time.sleep(0.01)
    for rank, time_ns in enumerate((30, 10, 20)):
        (tmp_path / f"{rank}.json").write_text(json.dumps({"time_ns": time_ns, "traceback": f"of {rank}"}))
    failure = processes.first_failure()
    assert failure is not None
    assert (failure.local_rank, failure.exit_status, failure.traceback) == (1, 2, "of 1")
    (tmp_path / "2.json").unlink()  # ended without a word: it was first, the others followed
    assert processes.first_failure().local_rank == 2
    processes.end(signal.SIGTERM, 1)


def test_a_rank_that_failed_but_does_not_end_counts_as_failed(tmp_path):
    processes = start(tmp_path, "import time; time.sleep(60)", "import time; time.sleep(60)")
    record = tmp_path / "1.json"
    record.write_text(json.dumps({"time_ns": 1, "traceback": "Traceback: stuck in an exit handler"}))
    assert processes.first_failure() is None
    os.utime(record, (time.time() - STUCK_AFTER_S - 1,) * 2)
    failure = processes.first_failure()
    assert failure is not None
    assert (failure.local_rank, failure.exit_status) == (1, 1)
    pids = processes.pids.values()
    processes.end(signal.SIGTERM, 1)
    assert all(gone(pid) for pid in pids)


def test_a_rank_that_failed_first_but_ends_slowly_is_still_the_first(tmp_path):
    processes = start(tmp_path, "raise SystemExit(1)", "import time; time.sleep(60)")
    (tmp_path / "1.json").write_text(json.dumps({"time_ns": 5, "exit_status": 3, "traceback": "the cause"}))
    (tmp_path / "0.json").write_text(json.dumps({"time_ns": 6, "exit_status": 1, "traceback": "a consequence"}))
    failure = wait_for_failure(processes)
    assert (failure.local_rank, failure.exit_status, failure.traceback) == (1, 3, "the cause")
    processes.end(signal.SIGTERM, 1)


def test_a_damaged_record_does_not_hide_the_failure(tmp_path):
    processes = start(tmp_path, "raise SystemExit(4)")
    (tmp_path / "0.json").write_text("{")
    assert wait_for_failure(processes).exit_status == 4
    processes.end(signal.SIGTERM, 1)


def test_a_command_that_cannot_start_ends_those_already_started(tmp_path):
    note = tmp_path / "pid"
    body = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    commands = [[sys.executable, "-c", body], [str(tmp_path / "absent")]]
    with pytest.raises(LaunchError, match="absent could not be started"):
        NodeProcesses.start(commands, [dict(os.environ)] * 2, [tmp_path / "0", tmp_path / "1"])
    assert not note.exists() or gone(int(note.read_text()))


def test_ranks_that_had_left_before_the_failure_are_known(tmp_path):
    processes = start(tmp_path, "pass", "import time; time.sleep(0.5); raise SystemExit(75)", "pass")
    failure = wait_for_failure(processes)
    assert (failure.local_rank, failure.exit_status, failure.left) == (1, 75, (0, 2))
    processes.end(signal.SIGTERM, 1)
