"""DeepSpeed's launcher flags and host files, as words of `trilithon launch`."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections import OrderedDict

import pytest

from trilithon.compat.deepspeed.launcher import launch
from trilithon.compat.deepspeed.launcher.flags import environment_file, native_arguments, parse_args
from trilithon.compat.deepspeed.launcher.runner import (
    encode_world_info,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
)
from trilithon.errors import ConfigError
from trilithon.launch.plan import Command

HERE = frozenset({"localhost", "this-machine"})


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two machines\n\nworker-0 slots=4\nworker-1 slots=4  # the second\n")
    return str(path)


def words(*argv):
    return native_arguments(argv, HERE)


def test_host_files_are_read_and_faults_raise_value_errors(hosts, tmp_path):
    assert fetch_hostfile(hosts) == OrderedDict([("worker-0", 4), ("worker-1", 4)])
    assert fetch_hostfile(str(tmp_path / "none")) is None
    for text in ("a slots=2\na slots=3\n", "a slots=x\n", "a\n", "", "# nothing\n"):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(ValueError, match="bad"):
            fetch_hostfile(str(tmp_path / "bad"))


def test_filters_leave_hosts_and_slots():
    pool = {"worker-0": 4, "worker-1": 4}
    assert parse_inclusion_exclusion(pool, "", "") == {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}
    assert parse_inclusion_exclusion(pool, "worker-1:3@worker-0:0,2", "") == {"worker-0": [0, 2], "worker-1": [3]}
    assert parse_inclusion_exclusion(pool, "", "worker-1:0") == {"worker-0": [0, 1, 2, 3], "worker-1": [1, 2, 3]}
    assert parse_resource_filter({"a": [0, 1], "b": [1]}, exclude_str="a") == {"b": [1]}
    for include, exclude in (("worker-0", "worker-1"), ("worker-9", ""), ("worker-0:9", ""), ("", "worker-9")):
        with pytest.raises(ValueError, match="worker"):
            parse_inclusion_exclusion(pool, include, exclude)


def test_world_info_travels_as_base64():
    info = {"worker-0": [0, 1]}
    assert json.loads(base64.urlsafe_b64decode(encode_world_info(info))) == info
    told, slots = launch.native_words(
        launch.parse_args(["--world_info", encode_world_info({"a": [0], "b": [1, 3]}), "--node_rank=1", "t.py", "--x"])
    )
    assert slots == [1, 3] and told[:5] == ["--deepspeed", "--nproc", "2", "--num-nodes", "2"]
    assert told[-3:] == ["--local-rank", "t.py", "--x"]
    for wrong in (["t.py"], ["--world_info", encode_world_info(info), "--node_rank=1", "t.py"]):
        with pytest.raises(ConfigError):
            launch.native_words(launch.parse_args(wrong))


def test_defaults_are_deepspeeds():
    args = parse_args(["train.py", "--num_gpus", "3"])
    assert (args.num_gpus, args.num_nodes, args.master_port, args.hostfile) == (-1, -1, 29500, "/job/hostfile")
    assert args.user_args == ["--num_gpus", "3"]  # the script's own


def test_on_this_machine():
    assert words("t.py", "--a", "1") == ["--deepspeed", "--local-rank", "t.py", "--a", "1"]
    assert words("--num_gpus", "2", "--no_local_rank", "t.py") == ["--deepspeed", "--nproc", "2", "t.py"]
    assert words("--num_gpus=2", "--module", "--master_port", "29500", "pkg.run")[1:] == [
        *("--nproc", "2", "--master-port", "29500", "--module", "--local-rank", "pkg.run"),
    ]
    assert words("--include", "localhost:1,2", "--no_python", "run.sh")[1:] == [
        *("--include", "localhost:1,2", "--no-python", "--local-rank", "run.sh"),
    ]
    told = words("--num_nodes", "2", "--node_rank", "1", "--master_addr", "worker-0", "t.py")
    assert told[1:7] == ["--num-nodes", "2", "--node-rank", "1", "--master-addr", "worker-0"]


def test_on_the_machines_of_a_host_file(hosts, tmp_path):
    whole = "worker-0:0,1,2,3@worker-1:0,1,2,3"
    assert words("-H", hosts, "t.py")[1:6] == ["--host-file", hosts, "--include", whole, "--ssh"]
    assert "worker-0:0,1" in words("-H", hosts, "--num_nodes", "1", "--num_gpus", "2", "t.py")
    told = words("-H", hosts, "--no_ssh", "--node_rank", "1", "t.py")
    assert "--ssh" not in told and told[told.index("--node-rank") + 1] == "1"
    assert "ssh -o BatchMode=yes -p 2222" in words("-H", hosts, "--ssh_port", "2222", "t.py")
    (tmp_path / "one").write_text("this-machine slots=2\n")
    assert "--ssh" not in words("-H", str(tmp_path / "one"), "t.py")
    assert "--ssh" in words("-H", str(tmp_path / "one"), "--force_multi", "t.py")
    with pytest.raises(ConfigError, match="node_rank"):
        words("-H", hosts, "--no_ssh", "t.py")
    with pytest.raises(ConfigError, match="fewer slots"):
        words("-H", hosts, "--num_gpus", "8", "t.py")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--include", "a", "--exclude", "b"], "exclude each other"),
        (["--include", "a", "--num_gpus", "2"], "do not go together"),
        (["--autotuning", "tune"], "autotuning"),
        (["--launcher", "openmpi"], "openmpi"),
        (["--bind_cores_to_rank"], "taskset"),
        (["--enable_each_rank_log", "logs"], "enable_each_rank_log"),
        (["--elastic_training"], "elastic_training"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(flags, said):
    with pytest.raises(ConfigError, match=said):
        words(*flags, "t.py")


def test_variables_of_the_environment_file_go_along(tmp_path, monkeypatch):
    (tmp_path / "more_env").write_text("# set everywhere\nNCCL_DEBUG=INFO\nMINE = a=b\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ENV_FILE", "more_env")
    assert environment_file() == {"NCCL_DEBUG": "INFO", "MINE": "a=b"}
    assert words("t.py")[1:5] == ["--export", "MINE", "--export", "NCCL_DEBUG"]


def test_a_command_says_its_local_rank_if_asked():
    assert Command("program", "run.sh", ("a",), local_rank=True).words(3) == ["run.sh", "a", "--local_rank=3"]
    assert Command("program", "run.sh", ("a",)).words(3) == ["run.sh", "a"]


def test_ranks_find_the_module_its_metadata_and_their_rank(tmp_path):
    script = tmp_path / "ask.py"
    script.write_text(
        "import importlib.metadata as m, importlib.util as u, os, sys\n"
        "assert u.find_spec('deepspeed') and m.packages_distributions()['deepspeed'] == ['deepspeed']\n"
        "from deepspeed.utils.zero_to_fp32 import WEIGHTS\n"
        "import deepspeed\n"
        "version, crossing = m.version('deepspeed'), os.environ['CROSS_SIZE']\n"
        "print(os.environ['RANK'], *sys.argv[1:], version, deepspeed.__name__, crossing)\n"
    )
    command = [
        sys.executable,
        "-m",
        "trilithon.cli.main",
        "launch",
        "--deepspeed",
        "--num_gpus",
        "2",
        str(script),
        "--x",
    ]
    path = os.pathsep.join(part for part in sys.path if part)
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "PYTHONPATH": path}
    )
    assert ended.returncode == 0, ended.stderr
    version = "0.19.8+trilithon trilithon.compat.deepspeed 1"
    assert sorted(ended.stdout.splitlines()) == [f"{rank} --x --local_rank={rank} {version}" for rank in (0, 1)]


def test_wrong_flags_end_with_status_2():
    command = [sys.executable, "-m", "trilithon.compat.deepspeed.launcher.runner", "--launcher", "mpich", "t.py"]
    path = os.pathsep.join(part for part in sys.path if part)
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": path}
    )
    assert ended.returncode == 2 and "mpich has no counterpart" in ended.stderr
