from __future__ import annotations

from pathlib import Path

import pytest

from trilithon.errors import ConfigError
from trilithon.launch import Command, LaunchOptions, make_plan
from trilithon.launch.devices import LocalMachine, count_accelerators, visible_devices

SCRIPT = Command("script", "train.py", ("--x", "a b"))
FOUR = LocalMachine(frozenset({"localhost", "here", "127.0.0.1"}), accelerators=4, cores=16)
NONE = LocalMachine(frozenset({"localhost", "here", "127.0.0.1"}), accelerators=0, cores=8)


def plan(machine=NONE, environment=None, **options):
    return make_plan(LaunchOptions(command=SCRIPT, **options), environment or {}, machine)


def devices(*args, **options):
    return [node.devices for node in plan(*args, **options).nodes]


def test_without_options_one_process_per_accelerator_or_one_on_cpu():
    assert devices(FOUR) == [("0", "1", "2", "3")]
    assert devices(NONE) == [("cpu",)]
    assert plan(FOUR).nodes[0].visible is None


def test_nproc_takes_the_first_devices_and_never_more_than_there_are():
    assert devices(FOUR, nproc=2) == [("0", "1")]
    assert devices(NONE, nproc=3) == [("cpu",) * 3]
    with pytest.raises(ConfigError, match=r"5 processes on localhost, but there are 4 devices.*--device cpu"):
        plan(FOUR, nproc=5)


def test_device_cpu_hides_every_accelerator():
    made = plan(FOUR, nproc=6, device="cpu")
    assert made.nodes[0].devices == ("cpu",) * 6
    assert made.nodes[0].visible == ""


@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}])
def test_device_cuda_needs_one(environment):
    with pytest.raises(ConfigError, match="--device cuda"):
        plan(NONE, environment, device="cuda")
    with pytest.raises(ConfigError):
        plan(NONE, environment, device="cuda", include="localhost:0")


def test_hidden_devices_mean_cpu():
    assert devices(FOUR, {"CUDA_VISIBLE_DEVICES": ""}) == [("cpu",)]
    assert devices(FOUR, {"CUDA_VISIBLE_DEVICES": "-1"}, nproc=2) == [("cpu", "cpu")]


def test_visible_devices_end_at_minus_one_and_refuse_nonsense():
    assert visible_devices({}) is None
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "2, 0,-1,3"}) == ("2", "0")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-1"}) == ("GPU-8932f937", "MIG-1")
    for nonsense in ("0,,1", "0,0", ","):
        with pytest.raises(ConfigError, match="empty or repeated"):
            visible_devices({"CUDA_VISIBLE_DEVICES": nonsense})


def test_a_filter_cannot_name_devices_that_are_visible_by_uuid():
    with pytest.raises(ConfigError, match="names them otherwise"):
        plan(FOUR, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, include="localhost")


def test_filters_on_this_machine():
    assert devices(FOUR, include="localhost:3,1") == [("1", "3")]
    assert devices(FOUR, exclude="here:0") == [("1", "2", "3")]
    with pytest.raises(ConfigError, match="slot 4"):
        plan(FOUR, include="localhost:4")
    with pytest.raises(ConfigError, match="has none"):
        plan(NONE, include="localhost:0")


def test_accelerators_are_counted_from_their_device_files(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert count_accelerators(tmp_path) == 2
    assert count_accelerators(tmp_path / "absent") == 0


def hosts(tmp_path: Path, text="here slots=2\nother slots=3\n") -> Path:
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


def test_ranks_follow_hosts_then_slots(tmp_path):
    made = plan(host_file=hosts(tmp_path), node_rank=0)
    rows = made.processes()
    assert [(row.host, row.rank, row.local_rank) for row in rows] == [
        ("here", 0, 0), ("here", 1, 1), ("other", 2, 0), ("other", 3, 1), ("other", 4, 2),
    ]  # fmt: skip
    assert {row.environment["WORLD_SIZE"] for row in rows} == {"5"}
    assert [row.environment["LOCAL_WORLD_SIZE"] for row in rows] == ["2", "2", "3", "3", "3"]
    assert (made.master_addr, made.master_port) == ("here", 29500)
    assert rows[0].command[1:] == ("train.py", "--x", "a b")


def test_threads_are_shared_unless_the_environment_says_otherwise(tmp_path):
    assert plan(FOUR, nproc=4).threads == 4
    assert plan(NONE, nproc=20).threads == 1
    assert plan(NONE, {"OMP_NUM_THREADS": "3"}).threads is None
    other_host = plan(host_file=hosts(tmp_path), node_rank=0).processes()[2]
    assert "OMP_NUM_THREADS" not in other_host.environment


def test_filters_set_the_devices_of_other_hosts_too(tmp_path):
    made = plan(host_file=hosts(tmp_path), include="here@other:0,2", ssh=True)
    assert made.node_rank is None
    assert [node.visible for node in made.nodes] == [None, "0,2"]


@pytest.mark.parametrize(
    "options, told",
    [
        ({"nproc": 0}, "--nproc 0"),
        ({"num_nodes": 0}, "--num-nodes 0"),
        ({"num_nodes": 2}, "needs --node-rank"),
        ({"num_nodes": 2, "node_rank": 0}, "needs --master-addr"),
        ({"num_nodes": 2, "node_rank": 2, "master_addr": "a"}, "does not fit 2 nodes"),
        ({"node_rank": 1}, "needs --num-nodes"),
        ({"ssh": True}, "Add --host-file"),
        ({"max_restarts": -1}, "negative"),
        ({"master_port": 70000}, "not a port"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        plan(**options)


@pytest.mark.parametrize(
    "text, options, told",
    [
        ("a slots=1\nb slots=1\n", {}, "--ssh.*--node-rank"),
        ("a slots=1\nb slots=1\n", {"node_rank": 2}, "does not fit 2 hosts"),
        ("a slots=1\n", {}, "this machine is here"),
        ("here slots=1\n", {"nproc": 1}, "slots=N"),
        ("here slots=1\n", {"num_nodes": 1}, "--include"),
        ("here slots=1\n", {"ssh": True, "node_rank": 0}, "Keep one"),
        ("here slots=1\n", {"ssh": True, "max_restarts": 1}, "no effect"),
    ],
)
def test_host_files_and_options_that_do_not_fit_are_refused(tmp_path, text, options, told):
    with pytest.raises(ConfigError, match=told):
        plan(host_file=hosts(tmp_path, text), **options)


def test_slurm_gives_the_nodes(tmp_path):
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "2",
        "SLURM_NODELIST": "n[1-2]",
    }  # fmt: skip
    made = plan(environment=step, nproc=2)
    assert ([node.host for node in made.nodes], made.node_rank, made.world_size) == (["n1", "n2"], 1, 4)
    assert (made.master_addr, made.master_port) == ("n1", 20007)
    with pytest.raises(ConfigError, match="inside a SLURM step"):
        plan(environment=step, host_file=hosts(tmp_path), node_rank=0)
