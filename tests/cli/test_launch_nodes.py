"""Several nodes, played by several launchers on this machine; ssh is played by a shell."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from warm_python import python

LAUNCH = ["-m", "trilithon.cli.launch"]  # cold where the end of processes is looked at
BUSY_S = 100  # launchers and ranks import torch, on a machine that may be busy with other things

GATHER = """
import os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
pathlib.Path(sys.argv[1], "rank" + os.environ["RANK"]).write_text(" ".join(os.environ[n] for n in names))
"""

FAIL_ON_RANK_2 = """
import os, pathlib, sys, time
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
(folder / f"rank{rank}.pid").write_text(str(os.getpid()))
while len(list(folder.glob("*.pid"))) < 3:
    time.sleep(0.01)
if rank == 2:
    time.sleep(0.3)
    raise KeyError("only rank two")
time.sleep(120)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def node(
    rank: int, nproc: int, port: int, script: Path, *arguments: str, program: str = sys.executable
) -> subprocess.Popen[str]:
    where = ["--num-nodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [program, *LAUNCH, "--nproc", str(nproc), *where, str(script), *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_nodes_of_different_size_agree_on_ranks(tmp_path):
    script, port = written(tmp_path, GATHER), free_port()
    nodes = [node(rank, nproc, port, script, str(tmp_path), program=python()) for rank, nproc in ((1, 1), (0, 2))]
    told = [process.communicate(timeout=BUSY_S)[1] for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0], told
    seen = [(tmp_path / f"rank{rank}").read_text() for rank in range(3)]
    assert seen == ["0 0 3 2 0 127.0.0.1", "1 1 3 2 0 127.0.0.1", "2 0 3 1 1 127.0.0.1"]


def test_a_failure_on_one_node_ends_the_other_with_the_same_status(tmp_path):
    script, port = written(tmp_path, FAIL_ON_RANK_2), free_port()
    nodes = [node(0, 2, port, script, str(tmp_path)), node(1, 1, port, script, str(tmp_path))]
    told = [process.communicate(timeout=BUSY_S)[1] for process in nodes]
    assert [process.returncode for process in nodes] == [1, 1], told
    assert told[1].rstrip().endswith("KeyError: 'only rank two'")
    assert "rank 2 on node-1" in told[0] and "Traceback" not in told[0]
    assert not any(alive(int(file.read_text())) for file in tmp_path.glob("*.pid"))


def test_a_launcher_that_dies_ends_the_other_node(tmp_path):
    script = written(tmp_path, FAIL_ON_RANK_2.replace("rank == 2", "False"))
    port = free_port()
    nodes = [node(0, 2, port, script, str(tmp_path)), node(1, 1, port, script, str(tmp_path))]
    deadline = time.monotonic() + BUSY_S
    while len(list(tmp_path.glob("*.pid"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    nodes[0].kill()
    told = [process.communicate(timeout=BUSY_S)[1] for process in nodes]
    assert nodes[1].returncode == 1
    assert "the launcher of node 0 is gone" in told[1]
    assert not any(alive(int(file.read_text())) for file in tmp_path.glob("*.pid"))


def test_restarts_give_a_script_another_try(tmp_path):
    script = written(
        tmp_path,
        "import os, sys\nassert os.environ['TORCHELASTIC_RESTART_COUNT'] == '1', 'first try'\nprint('second try')",
    )
    command = [python(), *LAUNCH, "--nproc", "1", "--max-restarts", "1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUSY_S, check=False)
    assert (done.returncode, done.stdout) == (0, "second try\n")


def fake_ssh(tmp_path: Path) -> str:
    path = tmp_path / "fake-ssh"
    path.write_text('#!/bin/sh\necho "$1" >> "$(dirname "$0")/hosts-called"\nexec sh -c "$2"\n')
    path.chmod(0o755)
    return str(path)


def over_ssh(tmp_path: Path, script: Path, *arguments: str, program: str = sys.executable) -> list[str]:
    hosts = tmp_path / "hosts"
    hosts.write_text("alpha slots=2\nbeta slots=1\n")
    options = ["--host-file", str(hosts), "--ssh", "--ssh-command", fake_ssh(tmp_path), "--device", "cpu"]
    options += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [program, *LAUNCH, *options, str(script), *arguments]


def test_ssh_starts_every_host_and_arguments_survive_the_shell(tmp_path):
    script = written(tmp_path, GATHER + "\npathlib.Path(sys.argv[1], 'argv').write_text(repr(sys.argv[2:]))")
    arguments = ["a b", "", "$HOME", "--x='1'", "--"]
    command = over_ssh(tmp_path, script, str(tmp_path), *arguments, program=python())
    done = subprocess.run(command, timeout=BUSY_S, check=False)
    assert done.returncode == 0
    assert sorted((tmp_path / "hosts-called").read_text().split()) == ["alpha", "beta"]
    assert (tmp_path / "rank2").read_text() == "2 0 3 1 1 127.0.0.1"
    assert (tmp_path / "argv").read_text() == repr(arguments)


def test_interrupting_the_ssh_side_leaves_nothing_running(tmp_path):
    script = written(tmp_path, FAIL_ON_RANK_2.replace("rank == 2", "False"))
    launcher = subprocess.Popen(over_ssh(tmp_path, script, str(tmp_path)), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + BUSY_S
    while len(list(tmp_path.glob("*.pid"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=BUSY_S) == 130
    assert not any(alive(int(file.read_text())) for file in tmp_path.glob("*.pid"))


def test_a_failure_over_ssh_returns_its_status(tmp_path):
    script = written(tmp_path, FAIL_ON_RANK_2.replace('raise KeyError("only rank two")', "sys.exit(9)"))
    done = subprocess.run(
        over_ssh(tmp_path, script, str(tmp_path)), timeout=BUSY_S, check=False, capture_output=True, text=True
    )
    assert done.returncode == 9, done.stderr
    assert not any(alive(int(file.read_text())) for file in tmp_path.glob("*.pid"))


def test_a_dry_run_over_ssh_starts_nothing(tmp_path):
    command = over_ssh(tmp_path, Path("nowhere.py"))
    command.insert(command.index("--ssh"), "--dry-run")
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[3].split()[:4] == ["beta", "2", "0", "cpu"]
    assert not (tmp_path / "hosts-called").exists()


def test_planning_does_not_import_torch(tmp_path):
    script = written(tmp_path, "")
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['launch', '--dry-run', '--nproc', '2', {str(script)!r}]\n"
        "try:\n    runpy.run_module('trilithon.cli.launch', run_name='__main__')\n"
        "except SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20, env=dict(os.environ))
