from __future__ import annotations

import pytest

from trilithon.errors import ConfigError
from trilithon.launch import expand_node_list, slurm_job

STEP = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "3",
    "SLURM_NODELIST": "gpu[01-02,07]",
}  # fmt: skip


@pytest.mark.parametrize(
    "text, nodes",
    [
        ("login", ["login"]),
        ("a,b-2", ["a", "b-2"]),
        ("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]n[0-1],x", ["rack1n0", "rack1n1", "rack2n0", "rack2n1", "x"]),
        ("a[1-2]-ib,b[5]", ["a1-ib", "a2-ib", "b5"]),
    ],
)
def test_node_lists_expand(text, nodes):
    assert list(expand_node_list(text)) == nodes


@pytest.mark.parametrize("text", ["", "a,,b", "a[1-", "a]1[", "a[3-1]", "a[x]", "a[]", "a[1-2", "a[[1]]"])
def test_malformed_node_lists_are_refused(text):
    with pytest.raises(ConfigError, match="SLURM node list"):
        expand_node_list(text)


def test_a_step_gives_nodes_rank_and_one_port_for_all():
    job = slurm_job(STEP)
    assert job is not None
    assert (job.nodes, job.node_rank) == (("gpu01", "gpu02", "gpu07"), 1)
    assert 1024 <= job.master_port < 32768
    assert slurm_job({**STEP, "SLURM_NODEID": "2", "SLURM_PROCID": "2"}).master_port == job.master_port


def test_outside_srun_there_is_no_step():
    assert slurm_job({}) is None
    batch_script = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}
    assert slurm_job(batch_script) is None


def test_the_step_wins_over_the_job():
    assert slurm_job({**STEP, "SLURM_STEP_NODELIST": "gpu[01-03]"}).nodes[2] == "gpu03"


@pytest.mark.parametrize(
    "change, told",
    [
        ({"SLURM_NTASKS": "6"}, "6 tasks on 3 nodes"),
        ({"SLURM_NODEID": "3"}, "does not fit 3 nodes"),
        ({"SLURM_NODELIST": ""}, "no SLURM_STEP_NODELIST"),
        ({"SLURM_NTASKS": "3(x2)"}, "not a whole number"),
    ],
)
def test_contradictions_are_refused(change, told):
    with pytest.raises(ConfigError, match=told):
        slurm_job({**STEP, **change})
