"""Collectives on CUDA tensors: NCCL's own, which already move what the formulas say.

fp32 and fp64 gradients are summed by NCCL's reduce-scatter, in the order that its ring or tree takes. 16-bit gradients
are exchanged and added in rank order in fp32 like on gloo, because NCCL would round at every hop; the bytes are the
same. Waiting enqueues on the current stream and does not block the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trilithon.comm.ordered import Add
from trilithon.contracts import ReduceOp

_OPS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.MAX: dist.ReduceOp.MAX, ReduceOp.MIN: dist.ReduceOp.MIN}


def all_gather(group: dist.ProcessGroup, full: Tensor, shard: Tensor) -> dist.Work | None:
    """full [W n] from every rank's shard [n]."""
    work: dist.Work | None = dist.all_gather_single(full.view(-1), shard.view(-1), group=group, async_op=True)
    return work


def all_to_all(
    group: dist.ProcessGroup, out: Tensor, full: Tensor, receive: Sequence[int] | None, send: Sequence[int] | None
) -> dist.Work | None:
    """out: what every rank had for this one in its `full`, in equal slices or in those of `receive` and `send`."""
    work: dist.Work | None = dist.all_to_all_single(
        out.view(-1),
        full.view(-1),
        list(receive) if receive is not None else None,
        list(send) if send is not None else None,
        group=group,
        async_op=True,
    )
    return work


def reduce_scatter(
    group: dist.ProcessGroup, full: Tensor, out: Tensor, add: Add, *, scale: float, accumulate: bool
) -> tuple[dist.Work | None, Callable[[], None]]:
    """The work in flight and the arithmetic that finishes it."""
    world_size, numel = group.size(), out.numel()
    if full.dtype.itemsize >= 4:
        total = torch.empty(numel, dtype=full.dtype, device=full.device)
        work = dist.reduce_scatter_single(total, full, group=group, async_op=True)
        return work, lambda: add(total.view(1, numel), out, scale, accumulate)
    received = torch.empty_like(full)
    work = dist.all_to_all_single(received, full, group=group, async_op=True)
    return work, lambda: add(received.view(world_size, numel), out, scale, accumulate)


def all_reduce(group: dist.ProcessGroup, tensor: Tensor, op: ReduceOp) -> dist.Work | None:
    """In place."""
    work: dist.Work | None = dist.all_reduce(tensor, _OPS[op], group=group, async_op=True)
    return work


def broadcast(group: dist.ProcessGroup, tensor: Tensor, source: int) -> dist.Work | None:
    """In place, from the member `source` of the group."""
    work: dist.Work | None = dist.broadcast(tensor, group=group, group_src=source, async_op=True)
    return work
