"""State in one file, resident only while it is borrowed: the next is read while this one is used and the last written.

    read k+1  |  use k  |  write k-1                    at most the budget of `Staging` is in memory at any time

What a key keeps is one or a few parts, each consecutive in the file and in memory, so that a part is a request. Fields
begin on pages in both; the padding is the file's, never a tensor's.
(Rajbhandari et al. 2021, arXiv:2104.07857, sections 5.1.2 and 6.3.)
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trilithon.contracts import State
from trilithon.errors import TierError
from trilithon.tiers.disk import Probe, RunFolder, open_tier_file
from trilithon.tiers.files import PAGE, FileIO, Ticket, page_up
from trilithon.tiers.staging import Lease, Staging

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """Fields that lie one behind the other. offset, size: in the file, in pages."""

    offset: int
    size: int
    fields: Mapping[str, tuple[int, int, torch.dtype]]  # start in the part in bytes, elements, type

    @staticmethod
    def of(state: Mapping[str, Tensor], offset: int) -> Part:
        """Laid out from `offset`. state: flat tensors."""
        fields, at = {}, 0
        for name, tensor in state.items():
            fields[name] = (at, tensor.numel(), tensor.dtype)
            at += page_up(tensor.numel() * tensor.element_size())
        return Part(offset, max(at, PAGE), fields)

    def views(self, memory: Tensor) -> State:
        """The fields as tensors over memory [size] u8."""
        return {
            name: memory[start : start + numel * dtype.itemsize].view(dtype)
            for name, (start, numel, dtype) in self.fields.items()
        }


@dataclass(slots=True)
class _Loaded:
    """What is, or will be, in memory of one key: its parts one behind the other in one lease."""

    parts: list[Part]
    lease: Lease | None
    tickets: list[Ticket] = field(default_factory=list)

    def pieces(self) -> Iterator[tuple[Part, Tensor]]:
        """Each part with its memory."""
        at = 0
        for part in self.parts:
            assert self.lease is not None
            yield part, self.lease.memory[at : at + part.size]
            at += part.size

    def wait(self) -> None:
        for ticket in self.tickets:
            ticket.wait()

    def release(self) -> None:
        for ticket in self.tickets:  # nothing may still be written into memory that somebody else gets
            ticket.finish()
        if self.lease is not None:
            self.lease.release()


class DiskStore:
    """`contracts.StateStore` over one file under `path`. For one thread at a time.

    expected_bytes: what will be kept, reserved at once. staging, io: this store's own; closed with it.
    Raises ConfigError if `path` cannot be used, TierError if the disk is too full or fails; a failed write is told by
    the next call that could depend on it, and by `failure`.
    """

    tier = "disk"

    def __init__(
        self, path: Path, staging: Staging, io: FileIO, *, expected_bytes: int = 0, direct: bool = True
    ) -> None:
        self._staging, self._io = staging, io
        self._run = RunFolder(path)
        try:
            self._file, self.probe = open_tier_file(
                self._run.folder / "state", page_up(expected_bytes), io, staging, direct=direct
            )
        except BaseException:
            self.close()
            raise
        self._reserved, self._end = page_up(expected_bytes), 0
        self._records: dict[str, list[Part]] = {}
        self._loaded: dict[str, _Loaded] = {}  # read ahead, not borrowed yet
        self._writing: dict[str, list[Ticket]] = {}
        self._failed = threading.Lock()
        self._failure: TierError | None = None
        self._closed = False

    @property
    def folder(self) -> Path:
        return self._run.folder

    # ------------------------------------------------------------------------------------------------- borrowing
    @contextmanager
    def borrow(
        self, key: str, make: Callable[[], State] | None = None, *, write: bool = True, read: bool = True
    ) -> Iterator[State]:
        """Flat tensors over staging memory, valid inside the context; fields may be added.

        After an exception inside, what is on the disk stays as it was. Raises TierError as the class says.
        """
        self._raise_failure()
        if key not in self._records and make is None:
            raise KeyError(f"no state is kept under {key!r}")
        loaded = self._loaded.pop(key, None) or self._load(key, block=True, read=read)
        assert loaded is not None
        try:
            loaded.wait()
            state: State = {}
            for part, memory in loaded.pieces():
                state.update(part.views(memory))
            if key not in self._records and make is not None:
                state.update(make())
            here = dict(state)
            yield state
        except BaseException as error:
            loaded.release()
            if isinstance(error, TierError):
                self._fail(error)
            raise
        if write and not self._closed:
            self._save(key, loaded, here, state)
        else:
            loaded.release()

    def prefetch(self, key: str) -> None:
        """Begin to read, if there is room for it now."""
        if key in self._loaded or key not in self._records or not self._written(key):
            return
        loaded = self._load(key, block=False)
        if loaded is not None:
            self._loaded[key] = loaded

    def _load(self, key: str, *, block: bool, read: bool = True) -> _Loaded | None:
        """Memory for every part, and reads under way if asked. None when there is no room and `block` is off."""
        for ticket in self._writing.pop(key, []):
            ticket.wait()
        parts = list(self._records.get(key, []))
        if not parts:
            return _Loaded([], None)
        size = sum(part.size for part in parts)
        lease = self._room(size) if block else self._staging.try_acquire(size)
        if lease is None:
            return None
        loaded = _Loaded(parts, lease)
        if read:
            loaded.tickets = [self._io.read(self._file, memory, part.offset) for part, memory in loaded.pieces()]
        return loaded

    def _room(self, size: int) -> Lease:
        """Memory now or as soon as a write is done; what was read ahead makes way."""
        lease = self._staging.try_acquire(size)
        while lease is None and self._loaded:
            self._loaded.pop(next(reversed(self._loaded))).release()
            lease = self._staging.try_acquire(size)
        return lease if lease is not None else self._staging.acquire(size)

    # --------------------------------------------------------------------------------------------------- writing
    def _save(self, key: str, loaded: _Loaded, before: Mapping[str, Tensor], state: State) -> None:
        """Start to write everything; the memory comes back as the writes end."""
        here = set(itertools.chain.from_iterable(part.fields for part in loaded.parts))
        for name in here & state.keys():
            if state[name] is not before[name]:  # replaced instead of written to
                before[name].copy_(state[name])
        tickets = self._write(loaded)
        fresh = {name: tensor for name, tensor in state.items() if name not in here}
        if fresh:
            part = Part.of(fresh, self._end)
            self._extend(part.size)
            more = _Loaded([part], self._room(part.size))
            for part, memory in more.pieces():
                for name, view in part.views(memory).items():
                    view.copy_(fresh[name])
            tickets += self._write(more)
            self._records.setdefault(key, []).append(part)
        self._writing[key] = tickets

    def _write(self, loaded: _Loaded) -> list[Ticket]:
        lease, left = loaded.lease, itertools.count(len(loaded.parts) - 1, -1)
        if lease is None:
            return []
        lease.fly()
        tickets = [self._io.write(self._file, memory, part.offset) for part, memory in loaded.pieces()]

        def landed(ticket: Ticket) -> None:  # on a thread of `io`
            if ticket.failed():
                self._fail(ticket.error())
            if next(left) == 0:  # of all parts the last
                lease.release()

        for ticket in tickets:
            ticket.then(landed)
        return tickets

    def _extend(self, size: int) -> None:
        """More than was expected: a field was switched on during the run."""
        end = self._end + size
        if end > self._reserved:
            try:
                self._file.reserve(end)
            except OSError as error:
                failure = TierError(
                    f"{end} bytes for state do not fit on the disk of {self._file.path}: {error.strerror}. Free space "
                    "there, or name another folder in offload.path."
                )
                self._fail(failure)
                raise failure from error
            self._reserved = end
        self._end = end

    def _written(self, key: str) -> bool:
        if all(ticket.done() for ticket in self._writing.get(key, [])):
            self._writing.pop(key, None)
            return True
        return False

    # -------------------------------------------------------------------------------------------------- failures
    def _fail(self, error: TierError) -> None:
        with self._failed:
            self._failure = self._failure or error

    @property
    def failure(self) -> TierError | None:
        """The first request that failed, as far as is known now. What is kept cannot be relied on from then."""
        return self._failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def finish_writes(self) -> None:
        """Everything written is on the disk. Raises TierError if something is not."""
        for tickets in self._writing.values():
            for ticket in tickets:
                ticket.finish()
        self._writing.clear()
        self._raise_failure()

    # --------------------------------------------------------------------------------------------------- the end
    def bytes(self) -> dict[str, int]:
        """disk: the state, in pages; host: the buffers."""
        return {"disk": self._end, "host": self._staging.mapped_bytes}

    def close(self) -> None:
        """Waits for what is in flight and removes the files. Idempotent; what is asked for later raises TierError."""
        self._closed = True
        self._io.close()
        file = getattr(self, "_file", None)
        if file is not None:
            file.close()
        self._run.close()
        self._staging.close()
        for table in ("_records", "_loaded", "_writing"):
            getattr(self, table, {}).clear()
        gone = f"what {self._run.folder} held was removed when its engine ended: go on from a checkpoint."
        self._failure = getattr(self, "_failure", None) or TierError(gone)


__all__ = ["DiskStore", "Part", "Probe"]
