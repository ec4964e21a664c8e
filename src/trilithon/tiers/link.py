"""What an update of state in host memory needs from the accelerator: the gradient down, the new values up.

    copy down k+1  |  update k  |  copy up k-1            on a stream of its own for each direction

Buffers are locked and used again in turn. Where the state lies beside the gradient, nothing is copied.
(ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840, section 4.1: 2M bytes each way and step is the least there can be.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trilithon.contracts import Slice

_AHEAD = 2  # gradients on their way at the same time


@dataclass(eq=False, slots=True)
class _Buffer:
    memory: Tensor
    busy: Any = None  # the event after which it may be written again


class HostLink:
    """apart: (gradient, where the state is) -> copies are needed. For one thread at a time."""

    def __init__(self, apart: Callable[[Tensor, torch.device], bool] | None = None) -> None:
        self._apart = apart or (lambda grad, home: grad.device != home)
        self._free: list[_Buffer] = []
        self._coming: dict[str, tuple[_Buffer, Tensor, Any]] = {}
        self._streams: dict[str, Any] = {}
        self.bytes_down = self.bytes_up = 0

    def prefetch(self, slice_: Slice, home: torch.device) -> None:
        """The gradient of this slice is needed soon."""
        if not slice_.brings and len(self._coming) < _AHEAD and self._apart(slice_.grad, home):
            self._bring(slice_)

    @contextmanager
    def near(self, slice_: Slice, home: torch.device, *, write: bool = True) -> Iterator[Slice]:
        """The slice with its gradient, and if `write` its low-precision values, beside the state.

        On leaving, what was written is on its way, and later work on the accelerator's current stream waits for it.
        """
        if slice_.brings or not self._apart(slice_.grad, home):
            yield slice_
            return
        self._bring(slice_)
        held, grad, arrived = self._coming.pop(slice_.key)
        if arrived is not None:
            arrived.synchronize()
        if not write or slice_.low is None:
            yield replace(slice_, grad=grad)
            self._free.append(held)
            return
        buffer, low = self._take(slice_.low)
        if slice_.idle:  # what sits out is not written, and keeps its value
            low.copy_(slice_.low)
        yield replace(slice_, grad=grad, low=low)
        with self._on("up", slice_.low):
            slice_.low.copy_(low, non_blocking=True)
            buffer.busy = self._event(slice_.low)
        if buffer.busy is not None:
            torch.cuda.current_stream(slice_.low.device).wait_event(buffer.busy)
        self.bytes_up += low.numel() * low.element_size()
        self._free += [held, buffer]

    def _bring(self, slice_: Slice) -> None:
        if slice_.key in self._coming:
            return
        buffer, grad = self._take(slice_.grad)
        with self._on("down", slice_.grad):
            grad.copy_(slice_.grad, non_blocking=True)
            self._coming[slice_.key] = (buffer, grad, self._event(slice_.grad))
        self.bytes_down += grad.numel() * grad.element_size()

    def _take(self, like: Tensor) -> tuple[_Buffer, Tensor]:
        """A buffer, and the beginning of it typed and shaped as `like`."""
        size = like.numel() * like.element_size()
        buffer = next((one for one in self._free if one.memory.numel() >= size), None)
        if buffer is None:
            if self._free:
                self._free.pop(0)  # too short, so that as many stay as are used together
            buffer = _Buffer(torch.empty(size, dtype=torch.uint8, pin_memory=like.is_cuda))
        else:
            self._free.remove(buffer)
        if buffer.busy is not None:
            buffer.busy.synchronize()
            buffer.busy = None
        return buffer, buffer.memory[:size].view(like.dtype)

    def _on(self, direction: str, remote: Tensor) -> Any:
        """The stream of one direction, behind what the current one has been given."""
        if not remote.is_cuda:
            return nullcontext()
        if direction not in self._streams:
            self._streams[direction] = torch.cuda.Stream(remote.device)
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(remote.device))
        return torch.cuda.stream(stream)

    @staticmethod
    def _event(remote: Tensor) -> Any:
        return torch.cuda.current_stream(remote.device).record_event() if remote.is_cuda else None

    @property
    def bytes(self) -> int:
        return sum(buffer.memory.numel() for buffer in self._free)

    def forget(self) -> None:
        """A step begins: what an abandoned one had asked for is not its gradient."""
        for buffer, _, arrived in self._coming.values():
            buffer.busy = arrived
            self._free.append(buffer)
        self._coming.clear()

    def close(self) -> None:
        self._coming.clear()
        self._free.clear()


def home_of(slice_: Slice, state: Mapping[str, Tensor]) -> torch.device:
    """Where the masters of a slice are while its state is borrowed."""
    return state.get("master", slice_.master).device
