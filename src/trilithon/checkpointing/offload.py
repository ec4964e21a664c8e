"""Inputs of recomputed blocks in host memory until backward asks for them.

On CUDA the copies run on streams of their own, into pinned memory and back, and asking for the inputs of one block
sends those of the block before on their way. On the CPU, host memory is a buffer apart, so that everything is counted
and tested as it is elsewhere.
(Rajbhandari et al. 2021, arXiv:2104.07857, section 5.1.2; per step and rank 2 x layers x batch x tokens x width x
bytes per element cross the link.)
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch
from torch import Tensor

from trilithon.checkpointing.rest import Counter, DeviceRest, Form, Kept, Known, Memory
from trilithon.tiers import resident


class BySize:
    """Host memory in pieces of the sizes that were asked for, each used again for the same size and type."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[tuple[Tensor, torch.cuda.Event | None]]] = {}
        self.bytes = 0

    def take(self, like: Tensor) -> tuple[Tensor, list[torch.cuda.Event]]:
        spare = self._free.get((like.numel(), like.dtype))
        if spare:
            flat, read = spare.pop()
            return flat, [] if read is None else [read]
        self.bytes += like.numel() * like.element_size()
        if like.is_cuda:
            return torch.empty(like.numel(), dtype=like.dtype, pin_memory=True), []
        return resident(like.numel(), like.dtype), []

    def give_back(self, flat: Tensor, read: torch.cuda.Event | None) -> None:
        self._free.setdefault((flat.numel(), flat.dtype), []).append((flat, read))

    def close(self) -> None:
        self.bytes -= sum(flat.numel() * flat.element_size() for spare in self._free.values() for flat, _ in spare)
        self._free.clear()


class _Link:
    """Copies between a device and host memory: on CUDA each direction has a stream, on the CPU they are plain."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self.copied_bytes = 0  # in both directions

    def down(self, tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """tensor: flat. (Host memory, what to wait for before it is read.)"""
        buffer, read = self.memory.take(tensor)
        self.copied_bytes += tensor.numel() * tensor.element_size()
        if not tensor.is_cuda:
            return buffer.copy_(tensor), None
        down, _ = self._of(tensor.device)
        down.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(down):
            for event in read:
                down.wait_event(event)
            buffer.copy_(tensor, non_blocking=True)
            tensor.record_stream(down)
            return buffer, down.record_event()

    def up(
        self, buffer: Tensor, device: torch.device, ready: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """(flat, on the device; what to wait for before it is used)."""
        self.copied_bytes += buffer.numel() * buffer.element_size()
        if device.type != "cuda":
            return buffer.clone(), None
        _, up = self._of(device)
        made = torch.empty(buffer.numel(), dtype=buffer.dtype, device=device)
        up.wait_stream(torch.cuda.current_stream(device))  # its memory may still be in use by what was freed
        with torch.cuda.stream(up):
            if ready is not None:
                up.wait_event(ready)
            made.copy_(buffer, non_blocking=True)
            made.record_stream(up)
            return made, up.record_event()

    def _of(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams[device]


class _OnHost:
    """Copied to host memory; the device's memory is free as soon as nobody else needs the tensor."""

    def __init__(self, tensor: Tensor, rest: HostRest, call: int) -> None:
        self.call = call
        self._rest, self._asks = weakref.ref(rest), tensor.requires_grad
        self._form, self._link = Form(tensor), rest.link
        self._buffer, self._ready = rest.link.down(self._form.flat(tensor))
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._last_read: list[torch.cuda.Event | None] = [None]
        rest.counter.hold(self, id(self), tensor.numel() * tensor.element_size())
        weakref.finalize(self, _give_back, self._link.memory, self._buffer, self._last_read).atexit = False

    def begin_to_fetch(self) -> None:
        if self._coming is None:
            self._coming = self._link.up(self._buffer, self._form.device, self._ready)
            self._last_read[0] = self._coming[1]

    def fetch(self) -> Tensor:
        self.begin_to_fetch()
        assert self._coming is not None
        (flat, arrived), self._coming = self._coming, None
        rest = self._rest()
        if rest is not None:
            rest.prefetch(self.call - 1)
        if arrived is not None:
            stream = torch.cuda.current_stream(flat.device)
            stream.wait_event(arrived)
            flat.record_stream(stream)
        return self._form.shaped(flat).requires_grad_(self._asks)


def _give_back(memory: Memory, buffer: Tensor, last_read: list[torch.cuda.Event | None]) -> None:
    memory.give_back(buffer, last_read[0])


class HostRest:
    """Inputs that ask for gradients rest in host memory; masks and tables that blocks share stay.

    memory: where they lie there, `contiguous.Buffers` for instance; None for pieces of their own.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self.counter, self.link = Counter(), _Link(BySize() if memory is None else memory)
        self._here = DeviceRest()
        self._call = 0
        self._known: Known[_OnHost] = Known()
        self._of_call: dict[int, list[weakref.ref[_OnHost]]] = {}

    def begin(self, block: Hashable) -> None:
        if self._call % 64 == 0:  # forget calls whose graphs are gone
            alive = {call: [r for r in kept if r() is not None] for call, kept in self._of_call.items()}
            self._of_call = {call: kept for call, kept in alive.items() if kept}
        self._call += 1

    def keep(self, tensor: Tensor) -> Kept:
        if not tensor.requires_grad:
            return self._here.keep(tensor)
        kept = self._known.find(tensor)
        if kept is None:
            kept = _OnHost(tensor, self, self._call)
            self._known.remember(tensor, kept)
            self._of_call.setdefault(self._call, []).append(weakref.ref(kept))
        return kept

    def prefetch(self, call: int) -> None:
        """The block before: backward comes to it next."""
        for reference in self._of_call.get(call, []):
            kept = reference()
            if kept is not None:
                kept.begin_to_fetch()

    @property
    def peak_bytes(self) -> int:
        return self.counter.peak_bytes

    def bytes(self) -> dict[str, int]:
        """host: the inputs that are kept, and memory that waits to be used again."""
        here = self._here.bytes().get("device", 0)
        return {tier: size for tier, size in (("host", self.link.memory.bytes), ("device", here)) if size}

    def close(self) -> None:
        self.link.memory.close()
