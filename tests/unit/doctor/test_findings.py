from __future__ import annotations

import copy

import pytest

from trilithon.doctor import Report, as_json, as_text, judge
from trilithon.doctor.findings import GIB, human_bytes

HEALTHY = {
    "system": {"platform": "Linux", "machine": "x86_64", "executable": "python", "cores": 8},
    "versions": {"python": "3.12.1", "torch": "2.13.0+cpu", "trilithon": "0.1.0", "numba": None},
    "tools": {"c++": None, "g++": None, "gcc": None, "clang": None, "nvcc": None, "ninja": None},
    "memory": {"total_bytes": 64 * GIB, "available_bytes": 60 * GIB, "limit_bytes": None},
    "shared_memory": {"folder": "/dev/shm", "total_bytes": 32 * GIB, "free_bytes": 32 * GIB},
    "cache": {"folder": "/home/a/.cache/trilithon", "total_bytes": 99 * GIB, "free_bytes": 90 * GIB},
    "here": {"folder": "/home/a", "total_bytes": 99 * GIB, "free_bytes": 90 * GIB},
    "limits": {"open_files": 4096},
    "host_name_resolves": True,
    "device_files": 0,
    "torch": {
        "backends": {"gloo": True, "nccl": False, "mpi": False},
        "devices": [],
        "cpu": {"vector_instructions": "AVX2", "threads": 8},
        "kernels": {"adam_step": {"implementations": ["torch"], "cpu": "torch"}},
    },
}


def with_changes(**changes):
    facts = copy.deepcopy(HEALTHY)
    for path, value in changes.items():
        *sections, last = path.split("__")
        place = facts
        for section in sections:
            place = place[section]
        place[last] = value
    return facts


def test_a_healthy_machine_without_compiler_or_accelerator_has_no_findings():
    assert judge(HEALTHY) == []


@pytest.mark.parametrize(
    "changes, level, told",
    [
        ({"versions__python": "3.10.4"}, "error", "Python 3.10.4 is older"),
        ({"versions__torch": "2.12.1+cu126"}, "error", "torch 2.12.1"),
        ({"versions__torch": None, "torch": {"trouble": "ModuleNotFoundError: torch"}}, "error", "not installed"),
        ({"torch": {"trouble": "ImportError: libc10.so"}}, "error", "cannot be imported: ImportError: libc10.so"),
        ({"torch__backends__gloo": False}, "warning", "no gloo"),
        ({"device_files": 2}, "warning", "torch can use none of them"),
        ({"torch__devices": [{"index": 0}]}, "warning", "no NCCL"),
        ({"torch__kernels__adam_step__implementations": ["numba", "torch"]}, "warning", "numba is not installed: adam"),
        ({"shared_memory": None}, "warning", "/dev/shm is not there"),
        ({"shared_memory__total_bytes": 64 * 2**20}, "warning", "holds only 64.0 MiB"),
        ({"memory__available_bytes": GIB}, "warning", "1.0 GiB of host memory"),
        ({"memory__limit_bytes": GIB}, "warning", "1.0 GiB of host memory"),
        ({"cache__free_bytes": GIB}, "warning", "free in /home/a/.cache"),
        ({"here__free_bytes": 0}, "warning", "0 B free in /home/a"),
        ({"limits__open_files": 256}, "warning", "only 256 files"),
        ({"host_name_resolves": False}, "warning", "does not lead to an address"),
        ({"bandwidth": {"two_ranks": {"trouble": "a\nConnectionError: refused"}}}, "warning", "refused"),
        ({"bandwidth": {"disk": {"trouble": "No space left"}}}, "warning", "No space left"),
    ],
)
def test_each_fault_is_found_once_with_a_way_out(changes, level, told):
    findings = judge(with_changes(**changes))
    assert [finding.level for finding in findings] == [level]
    assert told in findings[0].what
    assert len(findings[0].way_out) > 10


def test_errors_come_first_and_decide_whether_training_is_possible():
    facts = with_changes(limits__open_files=256, versions__python="3.10.4")
    report = Report(facts, tuple(judge(facts)))
    assert [finding.level for finding in report.findings] == ["error", "warning"]
    assert not report.can_train
    assert '"can_train": false' in as_json(report)
    assert as_text(report).endswith("training is NOT possible until the errors are mended")
    assert Report(HEALTHY, ()).can_train


def test_bytes_are_written_for_people():
    assert [human_bytes(n) for n in (0, 1023, 1536, 3 * 2**30, 5 * 2**40, None)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5.0 TiB", "unknown",
    ]  # fmt: skip
