"""DeepSpeed's launcher flags, as words of `trilithon launch`."""

from __future__ import annotations

import pytest

from trilithon.errors import ConfigError
from trilithon.launch.deepspeed import environment_file, native_arguments, parse_args
from trilithon.launch.plan import Command

HERE = frozenset({"localhost", "this-machine"})


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two machines\n\nworker-0 slots=4\nworker-1 slots=4  # the second\n")
    return str(path)


def words(*argv):
    return native_arguments(argv, HERE)


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
