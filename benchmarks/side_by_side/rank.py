"""The processes of one system: a host that forks the ranks before anything is imported, and the ranks themselves.

    python -m side_by_side.rank '{"system": ..., "shape": ...}' FD FD ...

Each rank talks to the benchmark over the socket FD, one JSON object a line: it says when it is ready, then makes steps
when told to, and says what they took. Everything ends when the benchmark does: the kernel kills the host with its
parent, and the ranks with their host.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import importlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def die_with_parent() -> None:
    """Linux: SIGKILL for this process when the one that started it ends, however it ends."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def raise_loopback() -> None:
    """A new network namespace has its `lo` down. Does nothing where it is up or the process may not."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = bytearray(struct.pack("16sh22x", b"lo", 0))
        fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("h", request, 16)
        if not flags & _IFF_UP:
            struct.pack_into("h", request, 16, flags | _IFF_UP)
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, bytes(request))


def memory(key: str) -> int:
    """Bytes of `VmRSS` or `VmHWM` of this process; 0 where the kernel does not tell."""
    path = Path("/proc/self/status")
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> bool:
    """VmHWM starts again from what is resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def bytes_on_loopback() -> int:
    """Received on `lo` in this network namespace, by all ranks, since it exists."""
    path = Path("/proc/self/net/dev")
    for line in path.read_text().splitlines() if path.exists() else []:
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    return 0


def host(spec: dict[str, Any], sockets: list[int]) -> int:
    """Fork one rank for each socket and wait for all; the exit status is 1 if any of them failed."""
    die_with_parent()
    raise_loopback()
    children = []
    for number, descriptor in enumerate(sockets):
        child = os.fork()
        if child == 0:
            die_with_parent()
            for other in sockets:
                if other != descriptor:
                    os.close(other)
            _guarded(spec, number, len(sockets), socket.socket(fileno=descriptor))
        children.append(child)
    for descriptor in sockets:
        os.close(descriptor)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return int(any(statuses))


def _guarded(spec: dict[str, Any], number: int, world_size: int, line: socket.socket) -> None:
    """Run a rank and leave without the interpreter's end, at which a process group could wait for others."""
    status = 1
    try:
        run_rank(spec, number, world_size, line)
        status = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            _say(line, {"error": f"{type(error).__name__}: {error}"[:600]})
        raise
    finally:
        sys.stdout.flush()
        if status:
            sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(status)


def _say(line: socket.socket, values: dict[str, Any]) -> None:
    line.sendall((json.dumps(values) + "\n").encode())


def _orders(line: socket.socket) -> Iterator[dict[str, Any]]:
    with line.makefile() as stream:
        for text in stream:
            yield json.loads(text)


def run_rank(spec: dict[str, Any], number: int, world_size: int, line: socket.socket) -> None:
    """Set up, report, and make steps until told to quit."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    started = time.perf_counter()
    import torch
    import torch.distributed

    from side_by_side.catalogue import System
    from side_by_side.shape import Shape
    from side_by_side.systems import MAKERS, Rank, join
    from side_by_side.workload import batch

    system, shape = System(**spec["system"]), Shape(**spec["shape"])
    torch.set_num_threads(spec["threads"])
    for name in system.imports:
        importlib.import_module(name)
    imported, resident = time.perf_counter(), memory("VmRSS")
    join(number, world_size, spec["port"])
    rank = Rank(system, shape, world_size)
    step = MAKERS[system.maker](rank)
    _say(
        line,
        {
            "import_s": imported - started,
            "setup_s": time.perf_counter() - imported,
            "modules": len(sys.modules),
            "imported_bytes": resident,
            "setup_peak_bytes": memory("VmHWM"),
        },
    )
    peak_is_of_steps = reset_peak()

    def data(at: int) -> list[torch.Tensor]:
        return [batch(shape, number, at * system.accumulation + i) for i in range(system.accumulation)]

    for order in _orders(line):
        if order["command"] == "quit":
            _say(line, {"peak_bytes": memory("VmHWM") if peak_is_of_steps else None})
            return
        numbers = range(order["first"], order["first"] + order["count"])
        _say(line, _steps(step, data, numbers, rank.sent_bytes, torch.distributed.barrier))


def _steps(
    step: Callable[[Any], float],
    data: Callable[[int], Any],
    numbers: range,
    sent_bytes: Callable[[], int] | None,
    barrier: Callable[[], object],
) -> dict[str, Any]:
    """The steps with these numbers, each between two barriers, which are outside the times."""
    walls, cpus, losses = [], [], []
    barrier()
    wire, sent = bytes_on_loopback(), sent_bytes() if sent_bytes else 0
    for at in numbers:
        batches = data(at)
        barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        losses.append(step(batches))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        barrier()
    return {
        "wall_s": walls,
        "cpu_s": cpus,
        "loss": losses,
        "wire_bytes": (bytes_on_loopback() - wire) / len(numbers),
        "sent_bytes": (sent_bytes() - sent) / len(numbers) if sent_bytes else None,
    }


def spec_of(system: Any, shape: Any, *, threads: int, port: int) -> str:
    """The first argument of the host."""
    values = {
        "system": dataclasses.asdict(system),
        "shape": dataclasses.asdict(shape),
        "threads": threads,
        "port": port,
    }
    return json.dumps(values)


if __name__ == "__main__":
    sys.exit(host(json.loads(sys.argv[1]), [int(text) for text in sys.argv[2:]]))
