"""Messages from one rank to another, counted and watched like collectives.

Two ranks that talk in one direction are a group of two with a journal of its own, so the watchdog compares their calls,
names the one that is missing, and on gloo a message can never be taken for another one.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trilithon.comm.journal import Call, Journal
from trilithon.comm.ledger import Ledger
from trilithon.comm.point_to_point import ConnectionLostError, PointToPoint, Work, said_by
from trilithon.comm.watchdog import Watchdog
from trilithon.contracts import Tag
from trilithon.errors import CollectiveError


class Message:
    """A send or receive in flight. The tensor stays untouched until `wait` returns."""

    def __init__(  # noqa: PLR0917 (made in one place)
        self, messages: Messages, peer: int, call: Call, watched: str, work: Work, tensor: Tensor
    ) -> None:
        self._messages, self._peer, self._call, self._watched = messages, peer, call, watched
        self._work: Work | None = work
        self._tensor: Tensor | None = tensor  # keeps the memory alive while the transport uses it

    def wait(self) -> None:
        """Idempotent. Raises CollectiveError when the connection is lost."""
        work, self._work = self._work, None
        if work is not None:
            self._messages._wait(self._peer, self._call, self._watched, work.wait)
        self._tensor = None

    def done(self) -> bool:
        return self._work is None


class Messages:
    """Ordered messages between the members of one process group, which nothing else uses.

    Between two ranks, sends of one direction and their receives happen in the same order. Peers are ranks in the group.
    Every rank makes its `Messages` with the same peers it will talk to, so that journals have the same names.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, *, name: str, ledger: Ledger, watchdog: Watchdog | None = None
    ) -> None:
        self.name, self.rank, self.world_size = name, process_group.rank(), process_group.size()
        self._pairs = PointToPoint(process_group)
        self._process_group = process_group
        self._ranks = dist.get_process_group_ranks(process_group)
        self._ledger, self._watchdog = ledger, watchdog
        self._journals: dict[tuple[int, int], tuple[Journal, str]] = {}  # by (sender, receiver)

    def send(self, peer: int, tensor: Tensor, tag: Tag) -> Message:
        """Begin to send a contiguous tensor that has elements."""
        journal, watched = self._journal(self.rank, peer)
        call = journal.issue("message", torch.uint8, 0, tag)
        size = tensor.numel() * tensor.dtype.itemsize
        self._ledger.record(
            "message", self.name, tensor.dtype, elements_in=tensor.numel(), elements_out=0, sent_bytes=size
        )
        wire = _as_bytes(tensor)
        return Message(self, peer, call, watched, self._pairs.send(peer, wire, call.code), wire)

    def receive(self, peer: int, tensor: Tensor, tag: Tag) -> Message:
        """Begin to receive into a contiguous tensor that has elements."""
        journal, watched = self._journal(peer, self.rank)
        call = journal.issue("message", torch.uint8, 0, tag)
        wire = _as_bytes(tensor)
        return Message(self, peer, call, watched, self._pairs.receive(peer, wire, call.code), wire)

    def send_object(self, peer: int, value: Any, tag: Tag) -> list[Message]:
        """Begin to send one small picklable value. Only between trusted ranks."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._device())
        size = torch.tensor([data.numel()], dtype=torch.int64, device=data.device)
        return [self.send(peer, size, tag), self.send(peer, data, tag)]

    def receive_object(self, peer: int, tag: Tag) -> Any:
        """Blocking."""
        size = torch.zeros(1, dtype=torch.int64, device=self._device())
        self.receive(peer, size, tag).wait()
        data = torch.empty(int(size), dtype=torch.uint8, device=size.device)
        self.receive(peer, data, tag).wait()
        return pickle.loads(data.cpu().numpy().tobytes())

    def _device(self) -> torch.device:
        has_cpu = any(device.type == "cpu" for device in self._process_group._device_types)
        return torch.device("cpu") if has_cpu else torch.device("cuda", torch.cuda.current_device())

    def _journal(self, sender: int, receiver: int) -> tuple[Journal, str]:
        pair = (sender, receiver)
        if pair not in self._journals:
            ranks = (self._ranks[sender], self._ranks[receiver])
            journal = Journal(f"{self.name} {ranks[0]}>{ranks[1]}", ranks)
            watched = self._watchdog.follow(journal) if self._watchdog is not None else journal.name
            self._journals[pair] = (journal, watched)
        return self._journals[pair]

    def _wait(self, peer: int, call: Call, watched: str, arrive: Callable[[], object]) -> None:
        watchdog = self._watchdog
        try:
            if watchdog is None:
                arrive()
                return
            watchdog.enter(call.kind, watched, call.tag, call.sequence)
            try:
                arrive()
            finally:
                watchdog.leave()
        except RuntimeError as error:
            lost = ConnectionLostError(peer, said_by(error))
            if watchdog is not None:
                watchdog.connection_lost(watched, call, self._ranks[peer], str(lost))
            raise CollectiveError(
                f"rank {self._ranks[self.rank]} lost its connection to rank {self._ranks[peer]} in a message for "
                f"{call.tag.module} (step {call.tag.step}): {lost}. Look at the output of rank {self._ranks[peer]}: it "
                "ended or failed first."
            ) from error


def _as_bytes(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous() and tensor.numel()
    return tensor.detach().view(-1).view(torch.uint8) if tensor.dtype != torch.uint8 else tensor.detach().view(-1)
