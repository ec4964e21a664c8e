"""`Group`: the collectives of `contracts.Collectives`, tagged, counted and with results that do not depend on chunking.

Always true: every rank of a group issues the same calls in the same order; a handle's tensors stay untouched until its
`wait` returns; sums are taken in rank order (see `ordered`), so gloo, shared memory and a group of one agree bit for
bit with the plain formula. On CUDA tensors NCCL's own collectives run (see `native`).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trilithon.comm import ledger as cost
from trilithon.comm import native
from trilithon.comm.journal import Call, Journal
from trilithon.comm.ledger import Ledger
from trilithon.comm.one_host import OneHost, allow_reading, can_read, host_identity
from trilithon.comm.ordered import Add, ordered_reduce, refuse_unsupported
from trilithon.comm.point_to_point import ConnectionLostError, PointToPoint, ReceiveBuffers
from trilithon.comm.watchdog import Watchdog
from trilithon.contracts import Handle, ReduceOp, Tag
from trilithon.errors import CollectiveError
from trilithon.kernels import ordered_sum

_FEW_BYTES = 1 << 15  # all_reduce: up to here one exchange of everything is cheaper than two of slices

_SECOND_PHASE = 1 << 30  # keeps the two exchanges of one all_reduce apart


class _Done:
    """A collective that was finished when it was issued."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


_DONE = _Done()


class _Pending:
    """A collective in flight: wait for the bytes, then finish the arithmetic, once."""

    def __init__(
        self,
        group: Group,
        call: Call,
        arrive: Callable[[], object],
        finish: Callable[[], None] | None,
        completed: Callable[[], bool] | None = None,
    ) -> None:
        self._group = group
        self._completed = completed  # for work on a stream, which can be asked
        self._call = call
        self._arrive: Callable[[], object] | None = arrive
        self._finish = finish

    def wait(self) -> None:
        arrive, finish = self._arrive, self._finish
        if arrive is None:
            return
        self._group._wait(self._call, arrive)
        if finish is not None:
            finish()
        self._arrive = self._finish = None

    def done(self) -> bool:
        """On CUDA, whether the device is done; on gloo, which does not tell, whether it was waited for."""
        return self._arrive is None or (self._completed is not None and self._completed())


class Group:
    """One group of ranks that talk; `process_group` None is a group of one, whose calls are local arithmetic.

    Collectives that may be in flight at the same time in an order that differs between ranks (gathers that read ahead
    while reductions run) need a Group each, on its own process group. Handles of `all_reduce` are waited for in the
    order in which they were issued. `tag.module` must be the same on all ranks of a call. Counts into `ledger`; reports
    waits to `watchdog`. `add` sums the pieces of a reduction; any replacement must round like `kernels.ordered_sum`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        name: str,
        ledger: Ledger | None = None,
        watchdog: Watchdog | None = None,
        shared_memory: bool = False,
        add: Add = ordered_sum,
    ) -> None:
        self.name = name
        self.ledger = ledger if ledger is not None else Ledger()
        self._process_group = process_group
        self._rank = process_group.rank() if process_group is not None else 0
        self._world_size = process_group.size() if process_group is not None else 1
        ranks = tuple(dist.get_process_group_ranks(process_group)) if process_group is not None else (0,)
        self._journal = Journal(name, ranks)
        # A group of one waits for nobody. What it does is its own: no call of another rank's has to be the same.
        self._watchdog = watchdog if process_group is not None else None
        self._watched = self._watchdog.follow(self._journal) if self._watchdog is not None else name
        self._pairs = PointToPoint(process_group) if process_group is not None else None
        self._buffers = ReceiveBuffers()
        self._add = add
        if shared_memory and self._pairs is not None:
            self._pairs = self._within_one_host(self._pairs)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's group under this one; None for a group of one."""
        return self._process_group

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks are in the group."""
        return self._world_size

    @property
    def buffer_bytes(self) -> int:
        """Bytes of receive buffers at rest between calls."""
        return self._buffers.bytes

    def destroy(self) -> None:
        """End the process group, which nobody else may use; unless the whole of torch.distributed has ended before."""
        process_group = self._process_group
        if process_group is not None and dist.is_initialized() and process_group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(process_group)

    def all_gather(self, full: Tensor, shard: Tensor, tag: Tag) -> Handle:
        """full [W n] becomes every rank's shard [n] in rank order; `shard` may be `full`'s own slice.

        On gloo the shard is copied into `full` at once and may change afterwards; on CUDA it must stay until `wait`.
        """
        numel = shard.numel()
        assert full.is_contiguous() and shard.is_contiguous() and full.numel() == self._world_size * numel
        assert full.dtype == shard.dtype, f"all_gather of {shard.dtype} into {full.dtype}"
        sent = cost.all_gather_bytes(numel, full.dtype.itemsize, self._world_size)
        call = self._issue("all_gather", full, tag, elements=(numel, full.numel()), sent=sent)
        if full.is_cuda and self._process_group is not None:
            return self._pending(call, native.all_gather(self._process_group, full, shard))
        slices = _slices(full, self._world_size)
        if slices[self._rank].data_ptr() != shard.data_ptr():
            slices[self._rank].copy_(shard.view(-1))
        return self._spread(call, slices)

    def all_to_all(
        self, out: Tensor, full: Tensor, tag: Tag, *,
        receive: Sequence[int] | None = None, send: Sequence[int] | None = None,
    ) -> Handle:  # fmt: skip
        """out [W n], in rank order: the slice [n] that each rank has for this one in its full [W n]. Not in place.

        send, receive: elements for and from each rank when they differ; what one sends is what the other receives.
        """
        assert full.is_contiguous() and out.is_contiguous() and (send is None) == (receive is None)
        assert full.dtype == out.dtype, f"all_to_all of {full.dtype} into {out.dtype}"
        if send is None or receive is None:
            assert full.numel() == out.numel() and full.numel() % self._world_size == 0
            slices, into, numel = _slices(full, self._world_size), _slices(out, self._world_size), full.numel()
        else:
            slices, into = list(full.view(-1).split(list(send))), list(out.view(-1).split(list(receive)))
            numel = 0  # differs between ranks
        sent = cost.sent_to_others_bytes([piece.numel() for piece in slices], full.dtype.itemsize, self._rank)
        call = self._issue("all_to_all", full, tag, elements=(full.numel(), out.numel()), sent=sent, numel=numel)
        if full.is_cuda and self._process_group is not None:
            return self._pending(call, native.all_to_all(self._process_group, out, full, receive, send))
        into[self._rank].copy_(slices[self._rank])
        if self._pairs is None or self._world_size == 1:
            return _DONE
        peers = list(self._pairs.peers())
        exchange = self._pairs.exchange(
            call.code, [(peer, slices[peer]) for peer in peers], [(peer, into[peer]) for peer in peers]
        )
        return _Pending(self, call, exchange.wait, None)

    def reduce_scatter(
        self, full: Tensor, out: Tensor, tag: Tag, *, scale: float = 1.0, accumulate: bool = False
    ) -> Handle:
        """out [n] becomes, or gains, scale * the sum in rank order of every rank's own slice of full [W n].

        `out` may have another floating dtype and may be `full`'s own slice; `full` stays untouched until `wait`.
        """
        numel = out.numel()
        assert full.is_contiguous() and out.is_contiguous() and full.numel() == self._world_size * numel
        sent = cost.reduce_scatter_bytes(numel, full.dtype.itemsize, self._world_size)
        call = self._issue("reduce_scatter", full, tag, elements=(full.numel(), numel), sent=sent)
        slices, into = _slices(full, self._world_size), out.view(-1)
        if self._pairs is None or self._world_size == 1:
            if accumulate or scale != 1.0 or into.data_ptr() != full.data_ptr() or into.dtype != full.dtype:
                self._add(full.view(1, -1), into, scale, accumulate)
            return _DONE
        if full.is_cuda and self._process_group is not None:
            work, finish = native.reduce_scatter(
                self._process_group, full.view(-1), into, self._add, scale=scale, accumulate=accumulate
            )
            return self._pending(call, work, finish)
        arrive, pieces, give_back = self._collect(call, slices)

        def add_in_rank_order() -> None:
            self._add(pieces, into, scale, accumulate)
            give_back()

        return _Pending(self, call, arrive, add_in_rank_order)

    def all_reduce(self, tensor: Tensor, tag: Tag, op: ReduceOp = ReduceOp.SUM) -> Handle:
        """In place, any shape: the sum, maximum or minimum over ranks, in rank order as in `reduce_scatter`."""
        assert tensor.is_contiguous()
        numel = tensor.numel()
        sent = cost.all_reduce_bytes(numel, tensor.dtype.itemsize, self._world_size)
        call = self._issue("all_reduce", tensor, tag, elements=(numel, numel), sent=sent, op=op)
        if self._pairs is None or self._world_size == 1:
            return _DONE
        if tensor.is_cuda and self._process_group is not None:
            return self._pending(call, native.all_reduce(self._process_group, tensor, op))
        flat = tensor.view(-1)
        if numel * tensor.dtype.itemsize <= _FEW_BYTES:
            return self._reduce_few(call, flat, op)
        slices = _slices(flat, self._world_size)
        arrive, pieces, give_back = self._collect(call, slices)

        def reduce_and_spread() -> None:
            ordered_reduce(pieces, slices[self._rank], op, self._add)
            give_back()
            self._spread(call, slices).wait()

        return _Pending(self, call, arrive, reduce_and_spread)

    def broadcast(self, tensor: Tensor, source: int, tag: Tag) -> Handle:
        """In place: every rank gets the values of the member `source`."""
        assert tensor.is_contiguous() and 0 <= source < self._world_size
        sent = cost.broadcast_bytes(tensor.numel(), tensor.dtype.itemsize, self._world_size)
        call = self._issue("broadcast", tensor, tag, elements=(tensor.numel(), tensor.numel()), sent=sent)
        if self._pairs is None or self._world_size == 1:
            return _DONE
        if tensor.is_cuda and self._process_group is not None:
            return self._pending(call, native.broadcast(self._process_group, tensor, source))
        flat = tensor.view(-1)
        sends = [(peer, flat) for peer in self._pairs.peers()] if source == self._rank else []
        receives = [] if source == self._rank else [(source, flat)]
        return _Pending(self, call, self._pairs.exchange(call.code, sends, receives).wait, None)

    def all_gather_object(self, value: Any, tag: Tag) -> list[Any]:
        """One small picklable value from every rank, in rank order. Blocking. Only for values of trusted ranks."""
        if self._world_size == 1:
            return [value]
        device = self._object_device()
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
        sizes = torch.zeros(self._world_size, dtype=torch.int64, device=device)
        sizes[self._rank] = data.numel()
        self._uncounted_gather("all_gather_object sizes", sizes, tag)
        longest = int(sizes.max())
        everything = torch.zeros(self._world_size * longest, dtype=torch.uint8, device=device)
        everything[self._rank * longest :][: data.numel()] = data
        self._uncounted_gather("all_gather_object", everything, tag)
        sent = cost.all_gather_bytes(data.numel(), 1, self._world_size)
        self.ledger.record(
            "all_gather_object",
            self.name,
            torch.uint8,
            elements_in=data.numel(),
            elements_out=int(sizes.sum()),
            sent_bytes=sent,
        )
        rows = everything.cpu().view(self._world_size, longest)
        return [pickle.loads(rows[r, :size].numpy().tobytes()) for r, size in enumerate(sizes.tolist())]

    def barrier(self, tag: Tag) -> None:
        """Return when every rank has called it."""
        if self._world_size > 1:
            flags = torch.zeros(self._world_size, dtype=torch.uint8, device=self._object_device())
            self._uncounted_gather("barrier", flags, tag)
        self.ledger.record("barrier", self.name, torch.uint8, elements_in=0, elements_out=0, sent_bytes=0)

    def _issue(
        self, kind: str, tensor: Tensor, tag: Tag, *, elements: tuple[int, int], sent: int, op: ReduceOp | None = None,
        numel: int | None = None,
    ) -> Call:  # fmt: skip
        refuse_unsupported(kind, tensor.dtype, op)
        self.ledger.record(
            kind, self.name, tensor.dtype, elements_in=elements[0], elements_out=elements[1], sent_bytes=sent
        )
        return self._journal.issue(kind, tensor.dtype, tensor.numel() if numel is None else numel, tag)

    def _pending(self, call: Call, work: dist.Work | None, finish: Callable[[], None] | None = None) -> Handle:
        """For work on a CUDA stream, where waiting does not block the host: the watchdog asks the work itself."""
        if work is None:
            return _DONE
        if self._watchdog is not None:
            self._watchdog.enter_streamed(call.kind, self._watched, call.tag, call.sequence, work.is_completed)
        return _Pending(self, call, work.wait, finish, work.is_completed)

    def _spread(self, call: Call, slices: list[Tensor]) -> Handle:
        """Send this rank's slice to all and receive theirs, in place."""
        if self._pairs is None or self._world_size == 1:
            return _DONE
        peers = list(self._pairs.peers())
        exchange = self._pairs.exchange(
            call.code ^ _SECOND_PHASE,
            [(peer, slices[self._rank]) for peer in peers],
            [(peer, slices[peer]) for peer in peers],
        )
        return _Pending(self, call, exchange.wait, None)

    def _collect(self, call: Call, slices: list[Tensor]) -> tuple[Callable[[], None], Tensor, Callable[[], None]]:
        """Send every peer its slice and receive this rank's from each: (wait, pieces [W, n] in rank order, give back).

        This rank's own piece is copied beside the others while theirs travel, so that the sum reads one block.
        """
        assert self._pairs is not None
        mine, peers = slices[self._rank], list(self._pairs.peers())
        received, buffer = self._buffers.take(self._world_size * mine.numel(), mine.dtype)
        pieces = received.view(self._world_size, mine.numel())
        exchange = self._pairs.exchange(
            call.code, [(peer, slices[peer]) for peer in peers], [(peer, pieces[peer]) for peer in peers]
        )
        pieces[self._rank].copy_(mine)
        return exchange.wait, pieces, lambda: self._buffers.give(buffer)

    def _reduce_few(self, call: Call, flat: Tensor, op: ReduceOp) -> Handle:
        """Everybody sends everything and reduces by itself: one exchange instead of two."""
        arrive, pieces, give_back = self._collect(call, [flat] * self._world_size)

        def reduce() -> None:
            ordered_reduce(pieces, flat, op, self._add)
            give_back()

        return _Pending(self, call, arrive, reduce)

    def _uncounted_gather(self, kind: str, full: Tensor, tag: Tag) -> None:
        """In place and blocking, without an entry in the ledger; sizes may not be known to all, so none is checked."""
        call = self._journal.issue(kind, full.dtype, 0, tag)
        slices = _slices(full, self._world_size)
        if full.is_cuda and self._process_group is not None:
            self._pending(call, native.all_gather(self._process_group, full, slices[self._rank].clone())).wait()
            return
        self._spread(call, slices).wait()

    def _within_one_host(self, pairs: PointToPoint) -> PointToPoint:
        """The faster transport when every member can read every other's memory, else `pairs`. Collective."""
        assert self._process_group is not None
        if self._world_size == 1 or self._object_device().type != "cpu":
            return pairs
        tag = Tag("transport within one host")
        token = torch.randint(256, (16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(os.getpid()))
        host = host_identity()
        if host:
            allow_reading()
        mine = (host, os.getpid(), token.data_ptr(), token.numpy().tobytes())
        everyone = self.all_gather_object(mine, tag)
        readable = all(bool(host) and there == host and can_read(*who) for there, *who in everyone)
        agreed = torch.tensor([readable])
        self.all_reduce(agreed, tag, ReduceOp.MIN).wait()
        return OneHost(self._process_group, [who[1] for who in everyone]) if agreed.item() else pairs

    def _object_device(self) -> torch.device:
        assert self._process_group is not None
        has_cpu = any(device.type == "cpu" for device in self._process_group._device_types)
        return torch.device("cpu") if has_cpu else torch.device("cuda", torch.cuda.current_device())

    def _wait(self, call: Call, arrive: Callable[[], object]) -> None:
        """Wait under the eyes of the watchdog; a lost connection becomes a CollectiveError that says which call."""
        watchdog = self._watchdog
        try:
            if watchdog is None:
                arrive()
                return
            watchdog.enter(call.kind, self._watched, call.tag, call.sequence)
            try:
                arrive()
            finally:
                watchdog.leave()
        except ConnectionLostError as error:
            peer = self._journal.ranks[error.peer]
            if watchdog is not None:
                watchdog.connection_lost(self._watched, call, peer, str(error))
            raise CollectiveError(
                f"rank {self._rank} of group {self.name} lost its connection to rank {peer} in call {call.sequence}, "
                f"{call.signature} (step {call.tag.step}): {error}. Look at the output of rank {peer}: it ended or "
                "failed first."
            ) from error


def _slices(full: Tensor, world_size: int) -> list[Tensor]:
    """`full` flattened and cut into `world_size` parts of equal length, the last ones shorter or empty if need be."""
    flat = full.view(-1)
    length = -(-flat.numel() // world_size)
    return [flat[min(r * length, flat.numel()) : min((r + 1) * length, flat.numel())] for r in range(world_size)]
