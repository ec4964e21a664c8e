"""Where the inputs of recomputed blocks rest until backward asks for them: where they are, or in host memory.

On CUDA the copies run on streams of their own, into pinned memory and back, and asking for the inputs of one block
sends those of the block before on their way. On the CPU, host memory is a buffer apart, so that everything is counted
and tested as it is elsewhere.
(Rajbhandari et al. 2021, arXiv:2104.07857, section 5.1.2; per step and rank 2 x layers x batch x tokens x width x
bytes per element cross the link.)
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

from trilithon.errors import ProtocolError
from trilithon.tiers import resident


class Kept(Protocol):
    """One tensor that backward will ask for."""

    def fetch(self) -> Tensor:
        """Its values, a leaf that asks for a gradient if the tensor did."""
        ...


class Rest(Protocol):
    """Keeps the inputs of blocks, call by call."""

    def begin(self) -> None:
        """The inputs that come now belong to the next block."""
        ...

    def keep(self, tensor: Tensor) -> Kept: ...

    def bytes(self) -> dict[str, int]:
        """What is kept now, by tier."""
        ...

    def close(self) -> None: ...


class _Here:
    """Kept where it is; noticed when something writes over it."""

    def __init__(self, tensor: Tensor, counter: _Counter) -> None:
        self._alias, self._version, self._asks = tensor.detach(), tensor._version, tensor.requires_grad
        storage = tensor.untyped_storage()
        counter.hold(self, storage._cdata, tensor.numel() * tensor.element_size())

    def fetch(self) -> Tensor:
        if self._alias._version != self._version:
            raise ProtocolError(
                f"the input of shape {tuple(self._alias.shape)} of a recomputed block was modified in place after the "
                "block had used it, so its activations cannot be computed again. Modify a copy, or leave the block out "
                "of `recompute`."
            )
        return self._alias.detach().requires_grad_(self._asks)


class _Counter:
    """Bytes of what is kept; one tensor that several blocks keep counts once."""

    def __init__(self) -> None:
        self.bytes = self.peak_bytes = 0
        self._holders: dict[int, int] = {}

    def hold(self, holder: object, key: int, size: int) -> None:
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(holder, self._let_go, key, size).atexit = False

    def _let_go(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.bytes -= size


class DeviceRest:
    """Inputs stay where they are."""

    def __init__(self) -> None:
        self._counter = _Counter()

    def begin(self) -> None:
        """Nothing to prepare."""

    def keep(self, tensor: Tensor) -> Kept:
        return _Here(tensor, self._counter)

    @property
    def peak_bytes(self) -> int:
        return self._counter.peak_bytes

    def bytes(self) -> dict[str, int]:
        return {"device": self._counter.bytes} if self._counter.bytes else {}

    def close(self) -> None:
        """Nothing is held beyond the graphs."""


class _Link:
    """Copies between a device and host memory. On CUDA each direction has a stream; on the CPU they are plain copies.

    Buffers of one size are used again, each only after the copies out of it are over.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[tuple[Tensor, torch.cuda.Event | None]]] = {}
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self.copied_bytes = 0  # in both directions

    def down(self, tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """(flat host buffer, what to wait for before it is read)."""
        key = (tensor.numel(), tensor.dtype)
        spare = self._free.get(key)
        buffer, busy = spare.pop() if spare else (self._new(tensor), None)
        self.copied_bytes += tensor.numel() * tensor.element_size()
        if not tensor.is_cuda:
            buffer.view(tensor.shape).copy_(tensor)
            return buffer, None
        down, _ = self._of(tensor.device)
        down.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(down):
            if busy is not None:
                down.wait_event(busy)
            buffer.view(tensor.shape).copy_(tensor, non_blocking=True)
            tensor.record_stream(down)
            return buffer, down.record_event()

    def up(
        self, buffer: Tensor, like: tuple[torch.Size, torch.device], ready: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """(the tensor on its device, what to wait for before it is used)."""
        shape, device = like
        self.copied_bytes += buffer.numel() * buffer.element_size()
        if device.type != "cuda":
            return buffer.view(shape).clone(), None
        _, up = self._of(device)
        made = torch.empty(shape, dtype=buffer.dtype, device=device)
        up.wait_stream(torch.cuda.current_stream(device))  # its memory may still be in use by what was freed
        with torch.cuda.stream(up):
            if ready is not None:
                up.wait_event(ready)
            made.copy_(buffer.view(shape), non_blocking=True)
            made.record_stream(up)
            return made, up.record_event()

    def give_back(self, buffer: Tensor, busy: torch.cuda.Event | None) -> None:
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append((buffer, busy))

    def _new(self, tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            return torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        return resident(tensor.numel(), tensor.dtype)

    def _of(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams[device]

    def spare_bytes(self) -> int:
        return sum(b.numel() * b.element_size() for buffers in self._free.values() for b, _ in buffers)

    def close(self) -> None:
        self._free.clear()


class _OnHost:
    """Copied to host memory; the device's memory is free as soon as nobody else needs the tensor."""

    def __init__(self, tensor: Tensor, rest: HostRest, call: int) -> None:
        self.call = call
        self._rest, self._asks = weakref.ref(rest), tensor.requires_grad
        self._like = (tensor.shape, tensor.device)
        self._link = rest.link
        self._buffer, self._ready = rest.link.down(tensor.detach())
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._last_read: list[torch.cuda.Event | None] = [None]
        rest.counter.hold(self, id(self), tensor.numel() * tensor.element_size())
        weakref.finalize(self, _give_back, self._link, self._buffer, self._last_read).atexit = False

    def begin_to_fetch(self) -> None:
        if self._coming is None:
            self._coming = self._link.up(self._buffer, self._like, self._ready)
            self._last_read[0] = self._coming[1]

    def fetch(self) -> Tensor:
        self.begin_to_fetch()
        assert self._coming is not None
        (tensor, arrived), self._coming = self._coming, None
        rest = self._rest()
        if rest is not None:
            rest.prefetch(self.call - 1)
        if arrived is not None:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(arrived)
            tensor.record_stream(stream)
        return tensor.requires_grad_(self._asks)


def _give_back(link: _Link, buffer: Tensor, last_read: list[torch.cuda.Event | None]) -> None:
    link.give_back(buffer, last_read[0])


class HostRest:
    """Inputs that ask for gradients rest in host memory; masks and tables that blocks share stay."""

    def __init__(self) -> None:
        self.counter, self.link = _Counter(), _Link()
        self._here = _Counter()
        self._call = 0
        self._known: weakref.WeakValueDictionary[tuple[int, int], _OnHost] = weakref.WeakValueDictionary()
        self._of_call: dict[int, list[weakref.ref[_OnHost]]] = {}

    def begin(self) -> None:
        if self._call % 64 == 0:  # forget calls whose graphs are gone
            alive = {call: [r for r in kept if r() is not None] for call, kept in self._of_call.items()}
            self._of_call = {call: kept for call, kept in alive.items() if kept}
        self._call += 1

    def keep(self, tensor: Tensor) -> Kept:
        if not tensor.requires_grad:
            return _Here(tensor, self._here)
        kept = _OnHost(tensor, self, self._call)
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
        """host: the inputs that are kept, and buffers that wait to be used again."""
        host = self.counter.bytes + self.link.spare_bytes()
        return {tier: size for tier, size in (("host", host), ("device", self._here.bytes)) if size}

    def close(self) -> None:
        self.link.close()
