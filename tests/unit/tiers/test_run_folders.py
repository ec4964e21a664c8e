"""A folder per run: two never share one, the dead are cleared up, the living are left alone."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from trilithon.errors import ConfigError, TierError
from trilithon.tiers import PAGE, File, FileIO, RunFolder, Staging, disk
from trilithon.tiers.disk import open_tier_file

HOLD = """
import sys, time
from pathlib import Path
from trilithon.tiers import RunFolder
run = RunFolder(Path(sys.argv[1]))
(run.folder / "state").write_bytes(b"x" * 100)
print(run.folder, flush=True)
time.sleep(60)
"""


def holder(path) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_each_run_has_its_own_and_takes_it_along(tmp_path):
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    assert first.folder != second.folder
    (first.folder / "state").write_text("a")
    second.close()
    assert (first.folder / "state").read_text() == "a"
    first.close()
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_is_cleared_up_and_a_living_one_is_not(tmp_path):
    (dead, dead_folder), (alive, alive_folder) = holder(tmp_path), holder(tmp_path)
    try:
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert os.path.exists(dead_folder)
        run = RunFolder(tmp_path)
        assert [str(folder) for folder in run.removed] == [dead_folder]
        assert not os.path.exists(dead_folder)
        assert os.path.getsize(f"{alive_folder}/state") == 100
        run.close()
    finally:
        for process in (dead, alive):
            process.kill()
            process.wait()
            process.stdout.close()


def test_what_another_machine_left_stays(tmp_path):
    """The lock of a network filesystem may not reach here."""
    folder = tmp_path / "trilithon-elsewhere-1-abcd"
    folder.mkdir()
    owner = {"host": socket.gethostname() + "-other", "process": 1, "started": "1"}
    folder.with_suffix(".lock").write_text(json.dumps(owner))
    RunFolder(tmp_path).close()
    assert folder.exists()


def test_a_process_number_used_again_does_not_save_the_dead(tmp_path):
    folder = tmp_path / "trilithon-here-1-abcd"
    folder.mkdir()
    owner = {"host": socket.gethostname(), "process": os.getpid(), "started": "1"}
    folder.with_suffix(".lock").write_text(json.dumps(owner))
    RunFolder(tmp_path).close()
    assert not folder.exists()


def test_files_of_others_stay(tmp_path):
    (tmp_path / "trilithon-notes.txt").write_text("mine")
    (tmp_path / "data").mkdir()
    RunFolder(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "trilithon-notes.txt"]


def test_a_folder_that_was_made_goes_with_its_last_user(tmp_path):
    path = tmp_path / "made"
    first, second = RunFolder(path), RunFolder(path)
    first.close()
    assert path.exists() and second.folder.exists()
    second.close()
    assert not path.exists()
    RunFolder(path).close()
    assert not path.exists() and tmp_path.exists()


def test_a_folder_that_was_there_or_holds_more_stays(tmp_path):
    RunFolder(tmp_path).close()
    path = tmp_path / "made"
    run = RunFolder(path)
    (path / "notes.txt").write_text("mine")
    run.close()
    assert (path / "notes.txt").exists() and list(tmp_path.iterdir()) == [path]


def test_a_folder_whose_parent_is_missing_is_refused_and_nothing_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"offload\.path='.*nope/deep' cannot be used: the folder '.*nope' does not"):
        RunFolder(tmp_path / "nope" / "deep")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_taken_away_meanwhile_is_made_again(tmp_path, monkeypatch):
    path, plain, calls = tmp_path / "made", disk.remove_dead, []

    def remove_dead(folder):
        if not calls:
            calls.append(shutil.rmtree(folder))
        return plain(folder)

    monkeypatch.setattr(disk, "remove_dead", remove_dead)
    run = RunFolder(path)
    assert run.folder.exists() and calls
    run.close()
    assert not path.exists()


def test_a_fork_that_exits_takes_nothing_along(tmp_path):
    run = RunFolder(tmp_path)
    child = os.fork()
    if child == 0:
        run.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert run.folder.exists()
    run.close()
    assert not run.folder.exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"offload\.path='.*file/below' cannot be used"):
        RunFolder(tmp_path / "file" / "below")
    real = os.open

    def refuse(path, flags, *mode, **more):
        if flags & os.O_CREAT and "trilithon-" in str(path):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", refuse)  # a mode bit would not stop root, who may run these tests
    with pytest.raises(ConfigError, match="Read-only file system"):
        RunFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_told_before_the_first_byte(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    io = FileIO(1)
    with pytest.raises(TierError, match=rf"{100 * PAGE} bytes for state cannot be had .*\d+ bytes are free"):
        open_tier_file(tmp_path / "state", 100 * PAGE, io, Staging(4 * PAGE))
    io.close()


def test_a_filesystem_that_takes_o_direct_only_in_name(tmp_path, monkeypatch):
    """Opening works, requests fail with EINVAL: found out by the probe, before any state is written."""
    real, io = os.pwritev, FileIO(1)
    direct: set[int] = set()
    opening = os.open

    def note(path, flags, *mode, **more):
        descriptor = opening(path, flags, *mode, **more)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def refuse(descriptor, views, offset):
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "open", note)
    monkeypatch.setattr(os, "pwritev", refuse)
    file, probe = open_tier_file(tmp_path / "state", 100 * PAGE, io, Staging(4 * PAGE))
    assert not probe.direct and not file.direct
    assert probe.write_rate > 0 and probe.read_rate > 0
    io.close()
    file.close()


def test_a_file_is_never_taken_over(tmp_path):
    File(tmp_path / "state").close()
    with pytest.raises(FileExistsError):
        File(tmp_path / "state")
