"""Files read and written in the background, past the page cache where the filesystem takes that.

A request is cut into pieces, and a few threads work on the pieces with `preadv` and `pwritev`, which release Python's
global lock: several requests are in flight, and nothing has to be compiled. Addresses, offsets and lengths are
multiples of `PAGE`, as O_DIRECT asks (Rajbhandari et al. 2021, arXiv:2104.07857, section 6.3). Where a filesystem
refuses O_DIRECT, the same requests go through the page cache, and are flushed and dropped from it.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from torch import Tensor

from trilithon.errors import ProtocolError, TierError

logger = logging.getLogger(__name__)

PAGE = 4096  # bytes: of memory, and no smaller than the logical block of any disk
Operation = Literal["read", "write"]
_REASONS = {
    errno.ENOSPC: "the filesystem is full: free space there, or name another folder in offload.path",
    errno.EDQUOT: "the quota is used up: free space there, or name another folder in offload.path",
    errno.EIO: "the device failed: see the system's log, and name a folder on another disk in offload.path",
    errno.EROFS: "the filesystem was made read-only: see the system's log, or name another folder in offload.path",
}


def page_up(size: int) -> int:
    """The next multiple of `PAGE`."""
    return -(-size // PAGE) * PAGE


class Ticket:
    """One request in flight. Keeps its memory alive until it is done."""

    def __init__(self, file: File, operation: Operation, memory: Tensor, offset: int, pieces: int) -> None:
        self._what = f"{operation} of {memory.numel()} bytes at offset {offset} of {file.path}"
        self._memory: Tensor | None = memory
        self._left, self._lock, self._landed = pieces, threading.Lock(), threading.Event()
        self._error: OSError | None = None
        self._over = False
        self._callbacks: list[Callable[[Ticket], None]] = []

    def done(self) -> bool:
        return self._landed.is_set()

    def wait(self) -> None:
        """Block until it is done. Idempotent. Raises TierError with path, offset and operation if it failed."""
        self._landed.wait()
        if self._error is not None:
            raise self.error() from self._error

    def finish(self) -> None:
        """Block until it is done, however it ends."""
        self._landed.wait()

    def failed(self) -> bool:
        """Known once it is done, and inside what `then` calls."""
        return self._error is not None

    def error(self) -> TierError:
        """What `wait` raises after a failure."""
        found = self._error
        number = (found.errno or 0) if found is not None else 0
        name = errno.errorcode.get(number, "")
        way_out = _REASONS.get(number, "see the system's log, or name another folder in offload.path")
        return TierError(f"{self._what} failed with {name or repr(found)} ({os.strerror(number)}): {way_out}.")

    def then(self, callback: Callable[[Ticket], None]) -> None:
        """callback(self) when it ends and before `wait` returns, on the thread that ends it; now, if it is over."""
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback(self)

    def _piece_done(self, error: OSError | None, finish: Callable[[], None]) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if not last:
            return
        if self._error is None:
            try:
                finish()
            except OSError as late:  # a flush tells what writes before it could not
                self._error = late
        with self._lock:
            self._memory = None
            self._over = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
        self._landed.set()


class File:
    """One open file of this process. `direct` tells whether requests go past the page cache."""

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        """Makes the file, which must not exist. Raises OSError as the system does."""
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.descriptor, self.direct = -1, False
        if direct and hasattr(os, "O_DIRECT"):
            try:
                self.descriptor, self.direct = os.open(path, flags | os.O_DIRECT, 0o600), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                path.unlink(missing_ok=True)  # some filesystems refuse only after they made the file
        if self.descriptor < 0:
            self.descriptor = os.open(path, flags, 0o600)

    def reserve(self, size: int) -> None:
        """Have `size` bytes on the disk, so that writing them later cannot find it full. Raises OSError."""
        if size <= 0:
            return
        try:
            os.posix_fallocate(self.descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(self.descriptor, size)

    def without_direct(self) -> None:
        """Go through the page cache from now: the filesystem took the flag and refuses the requests."""
        os.close(self.descriptor)
        self.descriptor, self.direct = os.open(self.path, os.O_RDWR | os.O_CLOEXEC), False

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class FileIO:
    """A few threads that read and write. threads: pieces in flight; piece_bytes: the largest, a multiple of `PAGE`."""

    def __init__(self, threads: int = 4, piece_bytes: int = 8 << 20) -> None:
        self._threads, self._piece_bytes = threads, max(PAGE, piece_bytes // PAGE * PAGE)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="trilithon-disk")
        self._counting = threading.Lock()
        self.bytes_read = self.bytes_written = 0

    def read(self, file: File, memory: Tensor, offset: int) -> Ticket:
        """Fill memory [n] u8 from the file. It must not be touched until the ticket is done."""
        return self._start(file, "read", memory, offset)

    def write(self, file: File, memory: Tensor, offset: int) -> Ticket:
        """Write memory [n] u8 to the file. It must not be changed until the ticket is done."""
        return self._start(file, "write", memory, offset)

    def _start(self, file: File, operation: Operation, memory: Tensor, offset: int) -> Ticket:
        size = memory.numel()
        if memory.data_ptr() % PAGE or size % PAGE or offset % PAGE or size == 0:
            raise ProtocolError(
                f"a {operation} of {size} bytes at offset {offset} to address {memory.data_ptr():#x}: all three have "
                f"to be multiples of {PAGE}. Take the memory from tiers.Staging and pad the length with page_up()."
            )
        piece = min(self._piece_bytes, max(1 << 20, page_up(-(-size // self._threads))))
        starts = range(0, size, piece)
        ticket = Ticket(file, operation, memory, offset, len(starts))
        view = memory.numpy().data
        for start in starts:
            part = view[start : min(start + piece, size)]
            self._pool.submit(self._run, ticket, file, operation, part, offset + start)
        with self._counting:
            if operation == "read":
                self.bytes_read += size
            else:
                self.bytes_written += size
        return ticket

    def _run(self, ticket: Ticket, file: File, operation: Operation, part: memoryview, offset: int) -> None:
        failure: OSError | None = None
        try:
            transfer(file, operation, part, offset)
        except OSError as error:
            failure = error
        except BaseException as error:  # whatever it is, nobody may wait for ever
            failure = OSError(errno.EIO, repr(error))

        def finish() -> None:
            if not file.direct:
                _flush(file, operation)

        ticket._piece_done(failure, finish)

    def close(self) -> None:
        """Waits for what is in flight."""
        self._pool.shutdown(wait=True)


def transfer(file: File, operation: Operation, part: memoryview, offset: int) -> None:
    """All of it, however often the system stops short. Raises OSError."""
    call = os.preadv if operation == "read" else os.pwritev
    at = 0
    for attempt in itertools.count():
        try:
            moved = call(file.descriptor, [part[at:]], offset + at)
        except InterruptedError:
            continue
        at = at + moved
        if at >= len(part):
            return
        if file.direct:
            at = at // PAGE * PAGE  # the rest has to begin on a block again
        if moved == 0 or attempt > 4 * len(part) // PAGE:
            end = "the file ends there" if operation == "read" else "nothing is taken any more"
            raise OSError(errno.EIO, f"{at} of {len(part)} bytes, and {end}")


def _flush(file: File, operation: Operation) -> None:
    """What the page cache holds goes to the disk and is forgotten: memory is what a tier is meant to save."""
    if operation == "write":
        os.fdatasync(file.descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
