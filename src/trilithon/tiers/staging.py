"""A fixed budget of page-aligned memory through which state passes on its way between tiers, used again and again.

Pieces of any size are cut from one mapping (first fit), so small slices do not take a whole buffer and a large one does
not set the size of all. Whoever finds no room waits for pieces that are in flight; if none is, waiting would be for
ever, and an error names the setting to change. (Rajbhandari et al. 2021, arXiv:2104.07857, section 6.3.)
"""

from __future__ import annotations

import logging
import mmap
import threading

import torch
from torch import Tensor

from trilithon.errors import TierError
from trilithon.tiers.files import page_up

logger = logging.getLogger(__name__)


class Lease:
    """One piece: `memory` [n] u8, aligned to a page, until `release`."""

    def __init__(self, owner: Staging, start: int, memory: Tensor) -> None:
        self._owner, self.start, self.memory = owner, start, memory
        self.size = memory.numel()
        self.in_flight = False

    def fly(self) -> None:
        """It will be released without its holder's doing, when a request that uses it is done."""
        self._owner._set_in_flight(self)

    def release(self) -> None:
        """Give it back; from any thread, once."""
        self._owner._release(self)


class Staging:
    """budget_bytes: all the memory there is. knob: the setting that enlarges it, for messages.

    pinned: lock it, so that an accelerator copies from and to it by itself. Memory is mapped when first asked for.
    """

    def __init__(self, budget_bytes: int, *, knob: str = "offload.buffers", pinned: bool = False) -> None:
        self.budget_bytes, self._knob, self._pinned = page_up(max(budget_bytes, 1)), knob, pinned
        self._memory: Tensor | None = None
        self._free = [(0, self.budget_bytes)]  # (start, size), in order, never adjacent
        self._taken: dict[int, Lease] = {}
        self._changed = threading.Condition()
        self.peak_bytes = 0

    def acquire(self, size: int) -> Lease:
        """A piece of `size` bytes, rounded up to pages; waits for pieces in flight.

        Raises TierError if it can never fit, or if all memory is held by somebody who is not about to release it.
        """
        with self._changed:
            while True:
                lease = self._take(page_up(size))
                if lease is not None:
                    return lease
                if page_up(size) > self.budget_bytes or not any(one.in_flight for one in self._taken.values()):
                    raise self._no_room(size)
                self._changed.wait()

    def try_acquire(self, size: int) -> Lease | None:
        """A piece if there is room now."""
        with self._changed:
            return self._take(page_up(size))

    def _take(self, size: int) -> Lease | None:
        for index, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[index : index + 1] = [(start + size, room - size)] if room > size else []
                lease = Lease(self, start, self._mapping()[start : start + size])
                self._taken[start] = lease
                self.peak_bytes = max(self.peak_bytes, sum(one.size for one in self._taken.values()))
                return lease
        return None

    def _mapping(self) -> Tensor:
        if self._memory is None:
            try:
                raw = mmap.mmap(-1, self.budget_bytes)  # shared: a fork must not move pages that a request reads into
            except OSError as error:
                raise TierError(
                    f"no memory for {self.budget_bytes} bytes of staging buffers ({error.strerror}). Lower "
                    f"{self._knob} or offload.sub_group_numel, or raise the process's memory limit."
                ) from error
            self._memory = torch.frombuffer(raw, dtype=torch.uint8)
            if self._pinned:
                _pin(self._memory)
        return self._memory

    def _no_room(self, size: int) -> TierError:
        held = sum(one.size for one in self._taken.values())
        return TierError(
            f"a buffer of {page_up(size)} bytes does not fit: the budget is {self.budget_bytes} bytes, of which {held} "
            f"are in use and none is about to come back. Raise {self._knob} or lower offload.sub_group_numel."
        )

    def _set_in_flight(self, lease: Lease) -> None:
        with self._changed:
            lease.in_flight = True
            self._changed.notify_all()

    def _release(self, lease: Lease) -> None:
        with self._changed:
            if self._taken.pop(lease.start, None) is not lease:
                raise AssertionError("a staging buffer was released twice")
            runs = sorted([*self._free, (lease.start, lease.size)])
            merged = [runs[0]]
            for start, size in runs[1:]:
                last_start, last_size = merged[-1]
                if last_start + last_size == start:
                    merged[-1] = (last_start, last_size + size)
                else:
                    merged.append((start, size))
            self._free = merged
            self._changed.notify_all()

    @property
    def mapped_bytes(self) -> int:
        return self.budget_bytes if self._memory is not None else 0

    def close(self) -> None:
        """Give the memory back. Tensors over it must not be used any more."""
        with self._changed:
            if self._memory is not None and self._pinned:
                _unpin(self._memory)
            self._memory = None


def _pin(memory: Tensor) -> None:
    """Lock pages for copies by an accelerator; where the system refuses, copies are slower and nothing else changes."""
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status != 0:
        logger.warning("%d bytes of staging could not be locked (CUDA error %d); copies wait", memory.numel(), status)


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
