"""Compiling on first use: nothing at import, kept on disk, safe against company, sudden death and damage."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trilithon.kernels import compiled
from trilithon.kernels.count_non_finite import count_non_finite_loop

ONE_LOOP = """
import time, torch
torch.set_num_threads(1)
started = time.process_time()
from trilithon.kernels import sum_of_squares, compiled
assert sum_of_squares(torch.full((200_000,), 2.0)) == 800_000.0
(loop,) = compiled._loops.values()
print("torch" if loop is None else f"hits={sum(loop.stats.cache_hits.values())}", time.process_time() - started)
"""


def environment(cache: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "TRILITHON_CACHE": str(cache), "TRILITHON_KERNELS": "auto", **more}


def python(code: str, cache: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(cache, **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def fresh_loop() -> Any:
    """The loop as a new process would get it, from the cache or compiled; checked to work."""
    loop = compiled._prepare(count_non_finite_loop, [("float32", 0)], [])
    assert loop is not None and loop(np.array([1.0, np.nan], np.float32)) == 1
    return loop


def hits(loop: Any) -> int:
    return sum(loop.stats.cache_hits.values())


def test_import_and_small_tensors_load_no_compiler_and_write_nothing(tmp_path: Path) -> None:
    code = """
import sys, torch
import trilithon.optim
from trilithon.kernels import sum_of_squares
assert sum_of_squares(torch.ones(1000)) == 1000.0
assert "numba" not in sys.modules
"""
    python(code, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_second_process_finds_the_loop_on_disk_and_is_ready_within_a_second(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    assert python(ONE_LOOP, tmp_path, PATH="").stdout.startswith("hits=0 ")  # no compiler needed on the path
    best = 10.0
    for _ in range(3):  # a core that is shared with another process does less in a second
        word, seconds = python(ONE_LOOP, tmp_path).stdout.split()
        assert word == "hits=1"
        best = min(best, float(seconds))
        if best < 1.0:
            break
    assert best < 1.0  # of processor time, numba's import included


def test_of_two_processes_at_once_one_compiles_and_the_other_waits_for_it(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    both = [
        subprocess.Popen([sys.executable, "-c", ONE_LOOP], env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    words = sorted(process.communicate(timeout=120)[0].split()[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert words == ["hits=0", "hits=1"]


def test_a_process_killed_while_compiling_leaves_no_lock_and_no_ruin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    victim = subprocess.Popen([sys.executable, "-c", ONE_LOOP], env=environment(tmp_path), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("kernels/*/lock")):
        assert victim.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    victim.kill()
    victim.wait(timeout=30)
    assert not list(tmp_path.glob("kernels/*/*.nbi"))  # it had not finished
    monkeypatch.setenv("TRILITHON_CACHE", str(tmp_path))
    assert [hits(fresh_loop()) for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", [b"", b"not what was written"])
def test_a_damaged_cache_is_compiled_anew_and_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, damage: bytes
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv("TRILITHON_CACHE", str(tmp_path))
    fresh_loop()
    (file,) = tmp_path.glob(f"kernels/*/*.{kind}")
    file.write_bytes(damage)
    outcomes = [hits(fresh_loop()) for _ in range(3)]
    assert (outcomes[0], outcomes[-1]) == (0, 1)


def test_a_cache_folder_that_cannot_be_made_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TRILITHON_CACHE", str(tmp_path / "file"))
    assert hits(fresh_loop()) == 0


def test_other_sources_get_another_cache_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")

    def loop() -> None: ...

    one = compiled._key(loop, "signature")
    monkeypatch.setattr(compiled, "_source_digest", lambda: "another")
    assert compiled._key(loop, "signature") != one


def test_without_numba_and_without_any_compiler_it_works_and_says_so_once(tmp_path: Path) -> None:
    code = """
import sys, logging
logging.basicConfig(level=logging.INFO)
sys.modules["numba"] = None
import torch
from trilithon.kernels import sum_of_squares
for _ in range(3):
    assert sum_of_squares(torch.full((200_000,), 2.0)) == 800_000.0
"""
    process = python(code, tmp_path, PATH="")
    assert process.stderr.count("numba is not installed") == 1
    assert "pip install 'trilithon[fast]'" in process.stderr


def test_a_loop_that_numba_cannot_compile_falls_back_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("numba")

    def strange(x: object) -> object:
        return {x: object}

    monkeypatch.setenv("TRILITHON_CACHE", str(tmp_path))
    monkeypatch.setenv("TRILITHON_KERNELS", "numba")
    assert compiled.compiled(strange, (torch.ones(3),), ()) is None
    assert "the torch implementation is used instead" in caplog.text
