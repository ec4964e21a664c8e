"""DeepSpeed's launcher as a module: host files, filters, and the ranks that it starts."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections import OrderedDict

import pytest

from trilithon.compat.deepspeed.launcher import launch
from trilithon.compat.deepspeed.launcher.runner import (
    encode_world_info,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
)
from trilithon.errors import ConfigError


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two machines\n\nworker-0 slots=4\nworker-1 slots=4  # the second\n")
    return str(path)


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


def test_ranks_find_the_module_its_metadata_and_their_rank(tmp_path):
    script = tmp_path / "ask.py"
    script.write_text(
        "import importlib.metadata as m, importlib.util as u, os, sys\n"
        "assert u.find_spec('deepspeed') and m.packages_distributions()['deepspeed'] == ['deepspeed']\n"
        "from deepspeed.utils.zero_to_fp32 import WEIGHTS\n"
        "import deepspeed\n"
        "version, crossing = m.version('deepspeed'), os.environ['CROSS_SIZE']\n"
        "told = [os.environ['RANK'], *sys.argv[1:], version, deepspeed.__name__, crossing]\n"
        "sys.stdout.write(' '.join(told) + '\\n')\n"  # at once: the ranks share the pipe
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
