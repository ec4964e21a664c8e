from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

from trilithon.doctor import bandwidth, machine, torch_facts


def test_host_memory_reads_the_container_limit(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  1024 kB\nMemFree: 10 kB\nMemAvailable:  512 kB\n")
    (tmp_path / "memory.max").write_text("524288\n")
    expected = {"total_bytes": 1024 * 1024, "available_bytes": 512 * 1024, "limit_bytes": 524288}
    assert machine.host_memory(tmp_path / "meminfo", tmp_path) == expected
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.host_memory(tmp_path / "meminfo", tmp_path)["limit_bytes"] is None
    (tmp_path / "memory.max").write_text(str(2**60))  # no limit, written as a huge number
    assert machine.host_memory(tmp_path / "meminfo", tmp_path)["limit_bytes"] is None
    unknown = {"total_bytes": None, "available_bytes": None, "limit_bytes": None}
    assert machine.host_memory(tmp_path / "absent", tmp_path / "absent") == unknown


def test_space_of_a_folder_that_is_not_there_yet_is_that_of_its_parent(tmp_path):
    here, there = machine.space(tmp_path), machine.space(tmp_path / "a" / "b")
    assert there["total_bytes"] == here["total_bytes"] > 0
    assert there["folder"] == str(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_the_cache_folder_follows_the_environment():
    assert machine.cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/trilithon")
    assert machine.cache_folder({}).parts[-2:] == (".cache", "trilithon")


def test_versions_know_what_is_absent(monkeypatch):
    monkeypatch.setattr(machine, "PACKAGES", ("trilithon", "pydantic", "no-such-package-of-ours"))
    found = machine.versions()
    assert found["no-such-package-of-ours"] is None
    assert found["pydantic"] and found["trilithon"]


def test_a_resolver_that_hangs_does_not_hold_the_report_up(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(machine.socket, "getaddrinfo", lambda *_: over.wait(60))
    assert machine.host_name_resolves(timeout_s=0.1) is False  # and not True, after a minute
    over.set()


def test_every_kernel_has_a_path_on_cpu():
    from trilithon import kernels

    paths = torch_facts.kernel_paths()
    assert set(paths) == set(kernels.__all__)
    for name, path in paths.items():
        assert "torch" in path["implementations"], name
        assert path["cpu"] in ("torch", "numba")


def test_the_path_named_for_a_kernel_is_the_one_taken(monkeypatch):
    """All kernels have a loop for numba; Adam has a version in Triton as well."""
    paths = torch_facts.kernel_paths()
    compiler = importlib.util.find_spec("numba") is not None
    assert {path["cpu"] for path in paths.values()} == {"numba" if compiler else "torch"}
    assert paths["adam_step"]["implementations"] == ["triton", "numba", "torch"]
    assert paths["sum_of_squares"]["implementations"] == ["numba", "torch"]
    monkeypatch.setenv("TRILITHON_KERNELS", "torch")
    assert {path["cpu"] for path in torch_facts.kernel_paths().values()} == {"torch"}


def test_the_disk_test_leaves_nothing_behind(tmp_path):
    measured = bandwidth.disk(tmp_path)
    assert measured["write_bytes_per_s"] > 0 and measured["read_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_told_not_raised(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bandwidth.tempfile, "TemporaryFile", refuse)
    assert "No space left on device" in bandwidth.disk(tmp_path)["trouble"]


def test_two_ranks_measure_both_collectives():
    measured = bandwidth.two_ranks(timeout_s=60)
    assert measured["bytes"] == 8 * 2**20  # half of 16 MiB goes to the one other rank
    assert measured["all_gather_bytes_per_s"] > 0 and measured["reduce_scatter_bytes_per_s"] > 0


def test_ranks_that_do_not_meet_in_time_are_told_not_raised():
    assert "not done within" in bandwidth.two_ranks(timeout_s=0.2)["trouble"]
