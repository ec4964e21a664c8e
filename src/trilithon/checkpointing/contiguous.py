"""Inputs of blocks side by side in buffers that are made once, so that they never lie between short-lived tensors.

Activations that live from forward to backward, allocated among those that live for one operation, leave gaps that fit
nothing else (Rajbhandari et al. 2020, arXiv:1910.02054, section 6.3). A buffer has room for a fixed number of inputs;
they are placed where there is room (first fit), and since backward gives them back in the opposite order, no gaps stay.
A buffer is never freed before `close`: when `number` is too small, further ones are made and used again as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trilithon.checkpointing.rest import Counter, DeviceRest, Form, Kept, Known
from trilithon.errors import ConfigError
from trilithon.tiers import resident

_ALIGNED = 64  # bytes; every element type divides it, and vector loads like it


@dataclass(eq=False)
class _Buffer:
    """One piece of memory [bytes] u8 and its free ranges (start, size), in order, never adjacent."""

    memory: Tensor
    free: list[tuple[int, int]] = field(default_factory=list)

    def place(self, size: int) -> int | None:
        """The start of the first free range of at least `size` bytes, which is no longer free."""
        for index, (start, room) in enumerate(self.free):
            if room >= size:
                self.free[index : index + 1] = [(start + size, room - size)] if room > size else []
                return start
        return None

    def release(self, start: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for begin, length in sorted([*self.free, (start, size)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self.free = merged


class Buffers:
    """Memory for inputs. number: how many of the size that is asked for first one buffer holds.

    off_device: host memory (locked where an accelerator copies from it); else memory of the device that a tensor is on.
    """

    def __init__(self, number: int, *, off_device: bool = False) -> None:
        if number < 1:
            raise ConfigError(f"recompute.number={number}: a buffer holds at least one input.")
        self.number, self._off_device = number, off_device
        self._buffers: dict[torch.device, list[_Buffer]] = {}
        self._taken: dict[int, tuple[_Buffer, int, int]] = {}  # address -> where it came from
        self._read: list[torch.cuda.Event] = []  # copies out of memory that was given back

    def take(self, like: Tensor) -> tuple[Tensor, list[torch.cuda.Event]]:
        size = -(-max(like.numel() * like.element_size(), 1) // _ALIGNED) * _ALIGNED
        there = self._buffers.setdefault(torch.device("cpu") if self._off_device else like.device, [])
        for buffer in there:
            start = buffer.place(size)
            if start is not None:
                break
        else:
            buffer = self._make(size * self.number, like)
            there.append(buffer)
            start = buffer.place(size)
            assert start is not None
        flat = buffer.memory[start : start + like.numel() * like.element_size()].view(like.dtype)
        self._taken[flat.data_ptr() if like.numel() else id(flat)] = (buffer, start, size)
        self._read = [event for event in self._read if not event.query()]
        return flat, list(self._read)

    def give_back(self, flat: Tensor, read: torch.cuda.Event | None) -> None:
        buffer, start, size = self._taken.pop(flat.data_ptr() if flat.numel() else id(flat))
        buffer.release(start, size)
        if read is not None:
            self._read.append(read)

    def _make(self, size: int, like: Tensor) -> _Buffer:
        if not self._off_device:
            memory = torch.empty(size, dtype=torch.uint8, device=like.device)
        elif like.is_cuda:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            memory = resident(size, torch.uint8)
        return _Buffer(memory, [(0, size)])

    @property
    def count(self) -> int:
        """How many buffers there are; one, if `number` was large enough."""
        return sum(len(there) for there in self._buffers.values())

    @property
    def bytes(self) -> int:
        return sum(buffer.memory.numel() for there in self._buffers.values() for buffer in there)

    def close(self) -> None:
        """No longer held here; memory in use is freed with its last user."""
        self._buffers.clear()


class _InBuffer:
    def __init__(self, tensor: Tensor, memory: Buffers, counter: Counter) -> None:
        self._form, self._asks = Form(tensor), tensor.requires_grad
        self._flat, _ = memory.take(tensor)
        self._flat.copy_(self._form.flat(tensor))
        counter.hold(self, id(self), tensor.numel() * tensor.element_size())
        weakref.finalize(self, memory.give_back, self._flat, None).atexit = False

    def fetch(self) -> Tensor:
        # A copy: what backward of the block saves of it may outlive its place in the buffer.
        return self._form.shaped(self._flat.clone()).requires_grad_(self._asks)


class ContiguousRest:
    """Inputs that ask for gradients are copied into buffers on their device; masks and tables stay where they are."""

    def __init__(self, number: int) -> None:
        self.memory, self._counter, self._here = Buffers(number), Counter(), DeviceRest()
        self._known: Known[_InBuffer] = Known()

    def begin(self, block: Hashable) -> None:
        """Nothing to prepare."""

    def keep(self, tensor: Tensor) -> Kept:
        if not tensor.requires_grad:
            return self._here.keep(tensor)
        kept = self._known.find(tensor)
        if kept is None:
            kept = _InBuffer(tensor, self.memory, self._counter)
            self._known.remember(tensor, kept)
        return kept

    @property
    def peak_bytes(self) -> int:
        """Of inputs in the buffers."""
        return self._counter.peak_bytes

    def bytes(self) -> dict[str, int]:
        size = self.memory.bytes + self._here.bytes().get("device", 0)
        return {"device": size} if size else {}

    def close(self) -> None:
        self.memory.close()
