"""Every collective on gloo is one exchange: what this rank sends to each peer and where it puts what they send.

gloo's own reduce-scatter moves as many bytes as its all-reduce, and its all-gather copies twice; sends and receives
between pairs move only what the formulas say, straight between the caller's buffers. The message tag is the call's code
(see `journal`), so several exchanges may be in flight and different collectives never mix.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class ConnectionLostError(RuntimeError):
    """The transport lost the connection to one peer."""

    def __init__(self, peer: int, said: str) -> None:
        super().__init__(said)
        self.peer = peer  # rank in the group


class Work(Protocol):
    """A send or receive in flight."""

    def wait(self) -> object: ...


class _Broken:
    """A send or receive that could not be started: its connection was closed already. Fails when waited for."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> object:
        raise self._error


class Exchange:
    """Sends and receives in flight between this rank and its peers."""

    def __init__(self, works: list[tuple[int, Work]], tensors: list[Tensor]) -> None:
        self._works = works
        self._tensors = tensors  # keeps the memory alive while gloo reads and writes it

    def wait(self) -> None:
        """Block until everything is sent and received. Raises ConnectionLostError."""
        for peer, work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise ConnectionLostError(peer, said_by(error)) from error
        self._works, self._tensors = [], []


def said_by(error: RuntimeError) -> str:
    """What gloo reported, without its source location and advice."""
    text = str(error).partition("] ")[2] or str(error)
    if "by peer" in text:
        return "connection closed by the other side"
    return text.splitlines()[0][:80]


class PointToPoint:
    """Exchanges over a process group's CPU backend."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group
        self._rank = process_group.rank()
        self._world_size = process_group.size()

    def peers(self) -> Iterable[int]:
        """The other ranks, beginning after this one, so that not everybody talks to the same rank first."""
        return ((self._rank + i) % self._world_size for i in range(1, self._world_size))

    def exchange(self, code: int, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Exchange:
        """Post receives, then sends: pairs of (peer, contiguous tensor). Empty tensors are left out on both sides."""
        return Exchange(*self._post(code, sends, receives))

    def receive(self, peer: int, tensor: Tensor, code: int) -> Work:
        """Begin to receive one message."""
        try:
            return self._process_group.recv([tensor], peer, code)
        except RuntimeError as error:
            return _Broken(error)

    def send(self, peer: int, tensor: Tensor, code: int) -> Work:
        """Begin to send one message."""
        try:
            return self._process_group.send([tensor], peer, code)
        except RuntimeError as error:
            return _Broken(error)

    def _post(
        self, code: int, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]
    ) -> tuple[list[tuple[int, Work]], list[Tensor]]:
        works: list[tuple[int, Work]] = []
        tensors: list[Tensor] = []
        for peer, tensor in receives:
            if tensor.numel():
                works.append((peer, self.receive(peer, tensor, code)))
                tensors.append(tensor)
        for peer, tensor in sends:
            if tensor.numel():
                works.append((peer, self.send(peer, tensor, code)))
                tensors.append(tensor)
        return works, tensors


class ReceiveBuffers:
    """Memory that receives land in, kept between calls: fresh pages cost more CPU than the copy into them.

    At most `kept` buffers rest here, the largest that were used; `bytes` says what they hold.
    """

    def __init__(self, kept: int = 2) -> None:
        self._kept = kept
        self._free: list[Tensor] = []  # [bytes] uint8 each, smallest first

    @property
    def bytes(self) -> int:
        """Bytes at rest (not those lent out)."""
        return sum(buffer.numel() for buffer in self._free)

    def take(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A tensor [numel] with arbitrary contents and the buffer to `give` back after use."""
        needed = numel * dtype.itemsize
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= needed:
                del self._free[index]
                return buffer[:needed].view(dtype), buffer
        buffer = torch.empty(-(-needed // 64) * 64, dtype=torch.uint8)
        return buffer[:needed].view(dtype), buffer

    def give(self, buffer: Tensor) -> None:
        """Return a buffer; the smallest is dropped when there are too many."""
        self._free.append(buffer)
        self._free.sort(key=Tensor.numel)
        if len(self._free) > self._kept:
            del self._free[0]

    def clear(self) -> None:
        """Drop everything at rest."""
        self._free.clear()
