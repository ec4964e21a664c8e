"""A folder of its own for what one engine of one rank keeps on disk, gone when the engine is.

    <path>/trilithon-<host>-<process>-<random>/     the files
    <path>/trilithon-<host>-<process>-<random>.lock held with flock as long as the owner lives
    <path>/.trilithon-made                          where <path> itself was made here, and goes with its last folder

The system drops the lock when its holder dies, however it dies, so whoever gets the lock of another folder knows that
nobody uses it any more and removes it. Two jobs given one path never touch each other's files. What lies here is
scratch: a checkpoint is what survives.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from trilithon.errors import ConfigError, TierError
from trilithon.tiers.files import File, FileIO, page_up
from trilithon.tiers.staging import Staging

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_PREFIX, _MADE = "trilithon-", ".trilithon-made"
_PROBE_BYTES = 8 << 20


class RunFolder:
    """Made at once, with what dead runs left under `path` removed. Use `folder`; `close` removes it.

    `path` itself is made if its parent exists, and then removed with the last folder in it. Raises ConfigError if
    nothing can be written under `path`.
    """

    def __init__(self, path: Path) -> None:
        if fcntl is None:
            raise ConfigError("state on disk needs file locks (flock), which this system does not have.")
        try:
            self.removed, self.folder, lock = _enter(path)
        except OSError as error:
            _leave(path)
            raise unusable(path, error) from error
        if self.removed:
            logger.info("removed what %d dead runs had left in %s", len(self.removed), path)
        self._end = weakref.finalize(self, _remove, self.folder, lock, os.getpid())  # also when the process exits

    def close(self) -> None:
        self._end()


def unusable(path: Path, error: OSError) -> ConfigError:
    """What a user is told about a folder for scratch."""
    missing = not path.parent.exists()
    reason = f"{error.strerror or error} ({error.filename or path})"
    return ConfigError(
        f"offload.path={str(path)!r} cannot be used: "
        + (f"the folder {str(path.parent)!r} does not exist. Make it, or name" if missing else f"{reason}. Name")
        + " a folder on a local disk that this process may write to."
    )


def _enter(path: Path) -> tuple[list[Path], Path, int]:
    """(folders of the dead that were removed, a new folder, its lock). Tried again if another run takes `path` away."""
    for attempt in itertools.count():
        try:
            _make(path)
            return remove_dead(path), *_claim(path)
        except FileNotFoundError:
            if attempt == 9 or not path.parent.exists():
                raise
    raise AssertionError("endless")


def _make(path: Path) -> None:
    """Only the last level: a parent that is not there is more often a slip of the pen than a wish."""
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    else:
        (path / _MADE).touch()


def _leave(path: Path) -> None:
    """Remove `path` if it was made here and holds nothing any more."""
    try:
        if os.listdir(path) != [_MADE]:
            return
        (path / _MADE).unlink()
    except OSError:
        return  # another rank was faster
    try:
        path.rmdir()
    except OSError:  # somebody came in between; it goes with them
        with suppress(OSError):
            (path / _MADE).touch()


def _claim(path: Path) -> tuple[Path, int]:
    """A new folder and the descriptor of its lock, which is held."""
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())[:40]
    while True:
        folder = path / f"{_PREFIX}{host}-{os.getpid()}-{secrets.token_hex(4)}"
        lock_path = folder.with_suffix(".lock")
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == os.stat(lock_path).st_ino:
                owner = {"host": socket.gethostname(), "process": os.getpid(), "started": _start_of(os.getpid())}
                os.write(lock, json.dumps(owner).encode())
                folder.mkdir(mode=0o700)
                return folder, lock
        except (BlockingIOError, FileNotFoundError):
            pass  # somebody who clears up took it in the moment before it was locked, and removes it: take another name
        except BaseException:
            lock_path.unlink(missing_ok=True)
            os.close(lock)
            raise
        os.close(lock)


def _start_of(process: int) -> str:
    """When a process of this machine started, in the system's ticks; "" if it is not there or the system does not say.

    A process number is used again; together with this it is not.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def remove_dead(path: Path) -> list[Path]:
    """Remove the folders under `path` whose owner is dead, and return them. Never touches those of the living."""
    removed = []
    for lock_path in sorted(path.glob(f"{_PREFIX}*.lock")):
        folder = lock_path.with_suffix("")
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _may_live(os.pread(lock, 4096, 0)):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                lock_path.unlink(missing_ok=True)
                removed.append(folder)
        except OSError:
            continue  # its owner lives
        finally:
            os.close(lock)
    return removed


def _may_live(owner: bytes) -> bool:
    """For filesystems whose locks do not reach other machines: only what died on this one is removed."""
    try:
        found = json.loads(owner)
        host, process, started = found["host"], int(found["process"]), found["started"]
    except (ValueError, KeyError, TypeError):
        return owner != b""  # locked, but not written to: killed between the two
    if host != socket.gethostname():
        return True
    return bool(started) and _start_of(process) == started


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork that exits does not take the files of its parent along
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".lock").unlink(missing_ok=True)
    _leave(folder.parent)
    try:
        os.close(lock)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise


@dataclass(frozen=True, slots=True)
class Probe:
    """What a first small write and read found: bytes per second, and whether requests go past the page cache."""

    write_rate: float
    read_rate: float
    direct: bool


def free_bytes(path: Path) -> int:
    """What this user may still write on the filesystem of `path`."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def open_tier_file(path: Path, size: int, io: FileIO, staging: Staging, *, direct: bool = True) -> tuple[File, Probe]:
    """A file with `size` bytes reserved, tried out with one write and one read of at most a few megabytes.

    A filesystem that takes O_DIRECT only in name is found out here. Raises TierError when the disk is full or fails.
    """
    probe_bytes = min(_PROBE_BYTES, page_up(max(size, 1)), staging.budget_bytes)
    size = max(size, probe_bytes)
    try:
        file = File(path, direct=direct)
        file.reserve(size)
    except OSError as error:
        raise TierError(
            f"{size} bytes for state cannot be had in {path.parent}: {error.strerror} ({free_bytes(path.parent)} bytes "
            "are free). Free space there, or name another folder in offload.path."
        ) from error
    lease = staging.acquire(probe_bytes)
    try:
        lease.memory[:64] = torch.arange(64, dtype=torch.uint8)
        rates = _try_out(file, io, lease.memory)
    finally:
        lease.release()
    return file, Probe(rates[0], rates[1], file.direct)


def _try_out(file: File, io: FileIO, memory: torch.Tensor) -> tuple[float, float]:
    """Write and read rate. Falls back to the page cache where the filesystem refuses aligned requests."""
    before = memory[:64].clone()
    try:
        started = time.perf_counter()
        io.write(file, memory, 0).wait()
        written = time.perf_counter()
        memory[:64] = 0
        io.read(file, memory, 0).wait()
        read = time.perf_counter()
    except TierError as error:
        cause = error.__cause__
        if not file.direct or not isinstance(cause, OSError) or cause.errno != errno.EINVAL:
            raise
        logger.info("%s takes O_DIRECT and refuses its requests; state goes through the page cache", file.path)
        file.without_direct()
        memory[:64] = before
        return _try_out(file, io, memory)
    if not torch.equal(memory[:64], before):
        raise TierError(f"{file.path} does not give back what was written to it; name another folder in offload.path.")
    return memory.numel() / max(written - started, 1e-9), memory.numel() / max(read - written, 1e-9)
