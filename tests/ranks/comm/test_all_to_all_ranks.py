"""Every rank sends each other one its own part: equal parts, unequal ones, none."""

import pytest
import torch
import torch.distributed as dist

from trilithon.comm.collectives import Group
from trilithon.contracts import Tag
from trilithon.testing import ranks

TAG = Tag("experts")


@ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_equal_parts_are_transposed(world_size, dtype):
    rank, group = dist.get_rank(), Group(dist.group.WORLD, name="experts")
    full = torch.stack([torch.full((5,), 10 * rank + r) for r in range(world_size)]).to(dtype)
    out = torch.empty_like(full)
    with group.ledger.measure() as sent:
        group.all_to_all(out, full, TAG).wait()
    assert out[:, 0].tolist() == [10 * r + rank for r in range(world_size)]
    assert sent.all_to_all_bytes == (world_size - 1) * 5 * dtype.itemsize


@ranks(2, 3)
def test_unequal_parts_and_none_in_either_direction(world_size):
    """Rank r has r * (other + 1) elements for each other: the first rank sends nothing at all."""
    rank, group = dist.get_rank(), Group(dist.group.WORLD, name="experts")
    send, receive = [rank * (r + 1) for r in range(world_size)], [r * (rank + 1) for r in range(world_size)]
    full = torch.cat([torch.full((n,), float(100 * rank + r)) for r, n in enumerate(send)])
    out = torch.empty(sum(receive))
    with group.ledger.measure() as sent:
        first = group.all_to_all(out, full, TAG, receive=receive, send=send)
        other = torch.empty(world_size)
        second = group.all_to_all(other, torch.full((world_size,), float(rank)), TAG)
        second.wait()
        first.wait()
    expected = torch.cat([torch.full((n,), float(100 * r + rank)) for r, n in enumerate(receive)])
    assert torch.equal(out, expected)
    assert other.tolist() == list(range(world_size))
    assert sent.all_to_all_bytes == 4 * (sum(send) - send[rank]) + 4 * (world_size - 1)
