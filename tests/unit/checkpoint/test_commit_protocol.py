"""A save that is killed anywhere leaves a checkpoint that loads, and `latest` never names anything else."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
import traceback
from pathlib import Path

import pytest
import torch
from tables import model, model_contents, on_thread_ranks

from trilithon.checkpoint import Alone, Retention, durable, open_checkpoint, save, tags
from trilithon.errors import CheckpointError

STEPS = ("make_folder", "create", "write", "sync", "sync_folder", "rename", "remove_folder")


def step_of(folder: Path) -> int:
    """The step whose values are in the latest checkpoint: all of them, or the test fails."""
    with open_checkpoint(folder) as reader:
        step = reader.manifest.step
        assert reader.extra["step"] == step
        for name, tensor in model(step).items():
            assert torch.equal(reader.read("master", name), tensor)
    return step


def in_child(body, kill_after_s: float | None = None) -> int:
    """Run `body` in a forked process; its exit status, negative when it was killed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(number: int):
    """The process is killed before the `number`-th operation on the disk, or in the middle of it if it writes."""
    count = 0

    def before(name):
        nonlocal count
        count += 1
        if count == number:
            if name == "write":
                return True
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    for name in STEPS:
        original = getattr(durable, name)

        def step(*args, name=name, original=original, **kwargs):
            if before(name):
                original(args[0], args[1][: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(durable, name, step)


@pytest.mark.parametrize("tag", [None, "best"], ids=["a new name", "the same name again"])
def test_killed_before_each_operation_on_the_disk(tag, tmp_path):
    def save_step(step):
        save(tmp_path, tag or f"step-{step}", model_contents(step), Alone(), retention=Retention(keep=1))

    save_step(1)
    done = 1
    for number in range(1, 60):

        def body(number=number, step=done + 1):
            die_at(number)
            save_step(step)

        status = in_child(body)
        found = step_of(tmp_path)
        assert found in (done, done + 1), f"killed before operation {number}"
        assert (tmp_path / "latest").read_text().strip() in (tag, f"step-{found}")
        if status == 0:
            assert found == done + 1
            break
        assert status == -signal.SIGKILL
        done = found
    assert number > 15, "the save had fewer operations than the protocol has"
    hidden = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert hidden == [], "what killed saves left behind is gone after the next one"
    assert tags(tmp_path) == [tag or f"step-{found}"], "keep=1"


def test_a_hundred_kills_at_random_moments(tmp_path):
    """Children save one step after the other until they are killed; whatever is there then is whole, and the newest."""
    rng = random.Random(7)
    save(tmp_path, "step-0", model_contents(0), Alone())
    before, seen = 0, set()
    for _ in range(100):

        def body(first=before + 1):
            for step in range(first, first + 1000):
                save(tmp_path, f"step-{step}", model_contents(step), Alone(), retention=Retention(keep=2))

        assert in_child(body, kill_after_s=rng.uniform(0.002, 0.08)) == -signal.SIGKILL
        named = (tmp_path / "latest").read_text().strip()
        assert (tmp_path / named / "MANIFEST.json").is_file()
        found = step_of(tmp_path)
        assert found >= before
        assert named == f"step-{found}", "the pointer names what is loaded"
        seen.add(found - before)
        before = found
    assert before > 5, "almost no save got through, so this showed nothing"


@pytest.mark.parametrize("operation", STEPS[:-1])
def test_an_error_on_one_rank_is_raised_by_all_and_leaves_the_old_checkpoint(operation, tmp_path, monkeypatch):
    assert all(isinstance(p, Path) for p in on_thread_ranks(2, lambda r: save(tmp_path, "a", model_contents(1), r)))
    original = getattr(durable, operation)

    def fails(*args, **kwargs):
        raise durable.cannot_write(Path("somewhere"), OSError(28, os.strerror(28)))

    monkeypatch.setattr(durable, operation, fails)
    errors = on_thread_ranks(2, lambda r: save(tmp_path, "b", model_contents(2), r))
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert "No space left on device" in str(errors[0])
    assert step_of(tmp_path) == 1
    monkeypatch.setattr(durable, operation, original)
    on_thread_ranks(2, lambda r: save(tmp_path, "b", model_contents(2), r))
    assert step_of(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "latest"]


def test_too_little_room_is_said_before_the_first_byte(tmp_path, monkeypatch):
    save(tmp_path, "a", model_contents(1), Alone())
    monkeypatch.setattr(durable, "free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match=r"needs [\d.]+ KiB and .* has 1000 bytes; nothing was written"):
        save(tmp_path, "b", model_contents(2), Alone())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]
    assert step_of(tmp_path) == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="file/runs cannot be written"):
        save(tmp_path / "file" / "runs", "a", model_contents(1), Alone())


def test_a_read_only_folder_is_named(tmp_path, monkeypatch):
    """Even root may not write where the file system says no."""

    def refuse(path, *args, **kwargs):
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=r"Read-only file system\. Save to a folder that this user may write to"):
        save(tmp_path / "runs", "a", model_contents(1), Alone())


@pytest.mark.parametrize("tag", ["", ".hidden", "a/b", "latest", "MANIFEST.json", ".."])
def test_tags_that_are_no_names_are_refused(tag, tmp_path):
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        save(tmp_path, tag, model_contents(1), Alone())


@pytest.mark.parametrize("what", ["folder", "tag", "step"])
def test_ranks_that_disagree_are_told_so_on_all(what, tmp_path):
    def body(rank):
        here = rank.rank if what == "folder" else 0
        tag = f"t{rank.rank}" if what == "tag" else "t"
        return save(tmp_path / str(here), tag, model_contents(rank.rank if what == "step" else 1), rank)

    errors = on_thread_ranks(2, body)
    assert all(isinstance(e, CheckpointError) and f"({what}: rank 0" in str(e) for e in errors)


def test_leftovers_of_living_processes_and_of_other_hosts_are_left_alone(tmp_path):
    host = socket.gethostname().replace(".", "-").replace("_", "-")
    living = tmp_path / f".a.{host}-{os.getppid()}-0123abcd.partial"
    elsewhere = tmp_path / ".a.elsewhere-1-0123abcd.partial"
    dead = tmp_path / f".a.{host}-{2**22 - 1}-0123abcd.partial"
    for path in (living, elsewhere, dead):
        path.mkdir()
    save(tmp_path, "a", model_contents(1), Alone())
    assert living.is_dir()
    assert elsewhere.is_dir()
    assert not dead.exists()
