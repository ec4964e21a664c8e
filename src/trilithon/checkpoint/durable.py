"""The few operations on files that a save consists of, each durable when it returns.

Everything that a save does to a disk goes through these functions, so that what a crash can leave behind is the list
of states between two of their calls, which the tests go through one by one.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from trilithon.errors import CheckpointError

_PORTION = 8 * 2**20  # bytes a call: large enough not to matter, small enough that a signal is seen between two


def make_folder(path: Path) -> None:
    """A folder, with those above it, known to the disk."""
    missing = made_for(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    for folder in missing:
        sync_folder(folder.parent)


def made_for(path: Path) -> list[Path]:
    """The folders that `make_folder` would have to make, the innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def unmake(folders: Iterable[Path]) -> None:
    """Take back folders that were made for nothing, the innermost first; those that hold something stay."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def create(path: Path) -> int:
    """A new file, open for writing."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o644)
    except OSError as error:
        raise cannot_write(path, error) from error


def write(descriptor: int, data: memoryview, path: Path) -> None:
    """All of `data`; path: for messages."""
    while len(data):
        try:
            data = data[os.write(descriptor, data[:_PORTION]) :]
        except OSError as error:
            raise cannot_write(path, error) from error


def sync(descriptor: int, path: Path) -> None:
    """What was written is on the disk."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise cannot_write(path, error) from error


def sync_folder(path: Path) -> None:
    """The names in a folder are on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no such call for folders
            raise cannot_write(path, error) from error
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """At once and for good: after a crash there is either the old name or the new one."""
    try:
        os.rename(old, new)
    except OSError as error:
        raise cannot_write(new, error) from error
    sync_folder(new.parent)
    if old.parent != new.parent:
        sync_folder(old.parent)


def write_file(path: Path, content: bytes) -> None:
    """A small file, complete on the disk."""
    descriptor = create(path)
    try:
        write(descriptor, memoryview(content), path)
        sync(descriptor, path)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes, token: str) -> None:
    """Whoever reads `path` sees what was there before or all of `content`. token: makes the temporary name unique."""
    temporary = path.with_name(f".{path.name}.{token}")
    write_file(temporary, content)
    rename(temporary, path)


def remove_folder(path: Path) -> None:
    """Best effort: what cannot be removed stays, under a name that no reader looks at."""
    shutil.rmtree(path, ignore_errors=True)


def free_bytes(path: Path) -> int:
    """What a user without special rights may still write next to `path`."""
    return shutil.disk_usage(path).free


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """The error of the system in the words of this library."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        way_out = "Make room there, keep fewer checkpoints (checkpoints.keep), or save elsewhere."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        way_out = "Save to a folder that this user may write to."
    else:
        way_out = "Checkpoints saved before are as they were."
    return CheckpointError(f"{path} cannot be written: {reason}. {way_out}")


def leftovers(folder: Path, endings: Iterable[str]) -> list[Path]:
    """Hidden folders with one of these endings, which saves that were killed left behind."""
    return [path for path in folder.iterdir() if path.name.startswith(".") and path.name.endswith(tuple(endings))]
