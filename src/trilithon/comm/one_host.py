"""Exchanges between processes of one host: the receiver copies straight out of the sender's memory.

A loopback socket costs a copy into the kernel, a copy out and a wake-up per packet on each side. Linux lets a process
read another's memory in one copy (`process_vm_readv`, "cross memory attach" in MPI implementations), from any buffer,
so there is no segment to size, to map or to clean up after a kill. The sender announces address and length as a small
message; the receiver's reading thread copies when it arrives, while the main thread computes, and acknowledges. Small
tensors travel in messages as usual. The bytes that arrive are the same, so results cannot differ.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from trilithon.comm.point_to_point import ConnectionLostError, Exchange, PointToPoint, Work, said_by

_LARGE_BYTES = 1 << 22  # below this a message is faster than announcement and acknowledgement
_ACKNOWLEDGE = 1 << 29  # turns the code of an exchange into that of its acknowledgements
_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, -1
_ONE_READ_BYTES = 1 << 30


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_memory(process_id: int, address: int, into: Tensor) -> None:
    """Fill the contiguous tensor `into` from `address` in another process. Raises OSError as the kernel reports."""
    libc = ctypes.CDLL(None, use_errno=True)
    done, total = 0, into.numel() * into.element_size()
    while done < total:
        length = min(total - done, _ONE_READ_BYTES)
        local = _IoVector(into.data_ptr() + done, length)
        remote = _IoVector(address + done, length)
        read = libc.process_vm_readv(process_id, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if read <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += read


def host_identity() -> str:
    """Equal for processes of one running system and process-id namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if not boot.exists() or not namespace.exists():
        return ""
    return f"{boot.read_text().strip()} {os.readlink(namespace)}"


def allow_reading() -> None:
    """Where the kernel restricts reading to ancestors (Yama scope 1), let this user's processes read this one."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not scope.exists() or scope.read_text().strip() != "1":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, ctypes.c_long(_ANY_PROCESS), 0, 0, 0)


def can_read(process_id: int, address: int, expected: bytes) -> bool:
    """Whether `expected` is found in the memory of that process."""
    found = torch.zeros(len(expected), dtype=torch.uint8)
    try:
        read_memory(process_id, address, found)
    except (OSError, AttributeError):  # AttributeError: a C library without process_vm_readv
        return False
    return found.numpy().tobytes() == expected


@dataclass(slots=True)
class _Arrival:
    """What one peer will announce, and where its tensor goes."""

    peer: int
    work: Work
    announced: Tensor  # [2] int64: address, bytes
    into: Tensor
    acknowledge_as: int


@dataclass(slots=True)
class _Reading:
    """The large tensors of one exchange."""

    arrivals: list[_Arrival]
    finished: threading.Event = field(default_factory=threading.Event)
    error: ConnectionLostError | None = None
    sent: list[tuple[int, Work, Tensor]] = field(default_factory=list)  # acknowledgements


class _DirectExchange(Exchange):
    """Also waits until everything large was read, here and by the peers."""

    def __init__(self, works: list[tuple[int, Work]], tensors: list[Tensor], reading: _Reading) -> None:
        super().__init__(works, tensors)
        self._reading = reading

    def wait(self) -> None:
        self._reading.finished.wait()
        if self._reading.error is not None:
            raise self._reading.error
        for peer, work, _ in self._reading.sent:
            self._works.append((peer, work))
        super().wait()


class OneHost(PointToPoint):
    """Exchanges within one host. Made for a group of which every member can read every other's memory."""

    def __init__(self, process_group: dist.ProcessGroup, process_ids: list[int]) -> None:
        super().__init__(process_group)
        self._process_ids = process_ids
        self._readings: SimpleQueue[_Reading | None] = SimpleQueue()
        thread = threading.Thread(
            target=_read_until_none,
            args=(self._readings, process_group, process_ids),
            name="trilithon-reader",
            daemon=True,
        )
        thread.start()
        weakref.finalize(self, self._readings.put, None)

    def exchange(self, code: int, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Exchange:
        """As in PointToPoint; both sides of a pair know the size and so agree on how it travels."""
        large_sends = [(peer, tensor) for peer, tensor in sends if _is_large(tensor)]
        large_receives = [(peer, tensor) for peer, tensor in receives if _is_large(tensor)]
        if not large_sends and not large_receives:
            return super().exchange(code, sends, receives)
        acknowledged = code ^ _ACKNOWLEDGE
        works, tensors = self._post(
            code,
            [(peer, tensor) for peer, tensor in sends if not _is_large(tensor)],
            [(peer, tensor) for peer, tensor in receives if not _is_large(tensor)],
        )
        arrivals = []
        for peer, tensor in large_receives:
            announced = torch.empty(2, dtype=torch.int64)
            arrivals.append(_Arrival(peer, self.receive(peer, announced, code), announced, tensor, acknowledged))
        for peer, tensor in large_sends:
            acknowledgement = torch.empty(1, dtype=torch.uint8)
            announcement = torch.tensor([tensor.data_ptr(), tensor.numel() * tensor.element_size()])
            works.append((peer, self.receive(peer, acknowledgement, acknowledged)))
            works.append((peer, self.send(peer, announcement, code)))
            tensors += [tensor, acknowledgement, announcement]
        reading = _Reading(arrivals)
        self._readings.put(reading)
        return _DirectExchange(works, tensors, reading)


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= _LARGE_BYTES


def _read_until_none(readings: SimpleQueue[_Reading | None], group: dist.ProcessGroup, process_ids: list[int]) -> None:
    """The reading thread: one exchange after another, in the order in which they were issued."""
    while (reading := readings.get()) is not None:
        try:
            for arrival in reading.arrivals:
                _read(arrival, reading, group, process_ids[arrival.peer])
        except ConnectionLostError as error:
            reading.error = error
        reading.arrivals.clear()
        reading.finished.set()
        del reading


def _read(arrival: _Arrival, reading: _Reading, group: dist.ProcessGroup, process_id: int) -> None:
    try:
        arrival.work.wait()
        address, length = arrival.announced.tolist()
        if length != arrival.into.numel() * arrival.into.element_size():
            raise ConnectionLostError(arrival.peer, f"it announced {length} bytes, another size than expected here")
        read_memory(process_id, address, arrival.into)
        done = torch.empty(1, dtype=torch.uint8)
        reading.sent.append((arrival.peer, group.send([done], arrival.peer, arrival.acknowledge_as), done))
    except OSError as error:
        raise ConnectionLostError(arrival.peer, f"its memory cannot be read: {error.strerror}") from error
    except ConnectionLostError:
        raise
    except RuntimeError as error:
        raise ConnectionLostError(arrival.peer, said_by(error)) from error
