"""Hosts on one machine: network namespaces, joined by a bridge, with a limit on every direction of every link.

Each host has one interface with a token-bucket filter on it, and so has the port of the bridge on the other side. There
is no extra latency. Nothing is attached to the machine's own network, and everything goes when the context ends.
Needs Linux, root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

_NETWORK = "10.213.77"
_WIRE = "wire0"


class NotPermittedError(RuntimeError):
    """This machine does not let us make network namespaces, with the reason."""


class Hosts:
    """`count` hosts; `limit` sets the rate of all links, `start` runs a command on every host."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._names = [f"tri{os.getpid()}h{index}" for index in range(count)]
        self._switch = f"tri{os.getpid()}sw"

    def __enter__(self) -> Hosts:
        why = _missing()
        if why:
            raise NotPermittedError(why)
        try:
            self._build()
        except subprocess.CalledProcessError as error:
            self._remove()
            said = error.stderr.strip() or f"status {error.returncode}"
            raise NotPermittedError(f"{' '.join(error.cmd)}: {said}") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _build(self) -> None:
        _call("ip", "netns", "add", self._switch)
        _call("ip", "-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _call("ip", "-n", self._switch, "link", "set", "bridge0", "up")
        for index, name in enumerate(self._names):
            _call("ip", "netns", "add", name)
            ends = ("link", "add", _WIRE, "type", "veth", "peer", "name", f"port{index}", "netns", self._switch)
            _call("ip", "-n", name, *ends)
            _call("ip", "-n", self._switch, "link", "set", f"port{index}", "master", "bridge0", "up")
            _call("ip", "-n", name, "addr", "add", f"{_NETWORK}.{index + 1}/24", "dev", _WIRE)
            _call("ip", "-n", name, "link", "set", _WIRE, "up")
            _call("ip", "-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def limit(self, rate: str) -> None:
        """rate: as tc writes it, "100mbit", or "none"."""
        ends = [(name, _WIRE) for name in self._names]
        ends += [(self._switch, f"port{index}") for index in range(self.count)]
        for namespace, device in ends:
            if rate == "none":
                command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "del", "dev", device, "root"]
                subprocess.run(command, capture_output=True, check=False)
                continue
            burst = "1mb" if rate.endswith("gbit") else "128kb"
            shape = ("root", "tbf", "rate", rate, "burst", burst, "limit", "4mb")
            _call("ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, *shape)

    @contextlib.contextmanager
    def start(self, command: Sequence[str], port: int = 29771) -> Iterator[list[subprocess.Popen[str]]]:
        """`command` on every host, in order of rank, with what torch.distributed reads; ended with the context."""
        processes = []
        try:
            for rank, name in enumerate(self._names):
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": "0",
                    "WORLD_SIZE": str(self.count),
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": f"{_NETWORK}.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": _WIRE,
                    "TP_SOCKET_IFNAME": _WIRE,
                }
                processes.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", name, *command],
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=sys.stderr,
                        text=True,
                    )
                )
            yield processes
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()


def sent_on_the_wire() -> int:
    """Bytes that this host has sent, headers included, as the kernel counts them."""
    with open(f"/sys/class/net/{_WIRE}/statistics/tx_bytes") as counter:
        return int(counter.read())


def _missing() -> str:
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"'{program}' is not installed (package iproute2)"
    return "" if os.geteuid() == 0 else "this needs root"


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
