"""The exchange in two steps brings what the flat one does, in fewer messages and for the bytes of the formula."""

import pytest
import torch
import torch.distributed as dist

from trilithon.comm.collectives import Group
from trilithon.comm.hierarchical import TwoLevel
from trilithon.comm.ledger import Ledger
from trilithon.contracts import Tag
from trilithon.testing.ranks import ranks

WIDTH, ITEM = 3, 4


def groups(nodes, per_node):
    """(flat, in two steps, their ledgers) over all ranks."""
    rank = dist.get_rank()
    inner = [dist.new_group([n * per_node + g for g in range(per_node)]) for n in range(nodes)][rank // per_node]
    outer = [dist.new_group([n * per_node + g for n in range(nodes)]) for g in range(per_node)][rank % per_node]
    ledgers = Ledger(), Ledger()
    flat = Group(dist.new_group(), name="flat", ledger=ledgers[0])
    two = TwoLevel(Group(inner, name="inner", ledger=ledgers[1]), Group(outer, name="outer", ledger=ledgers[1]))
    return flat, two, ledgers


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
@ranks(4)
def test_equal_parts(world_size, shape):
    flat, two, (one_step, two_steps) = groups(*shape)
    each = 5
    rows = torch.arange(world_size * each * WIDTH, dtype=torch.float32).view(-1, WIDTH) + 1000 * flat.rank
    expected = torch.empty_like(rows)
    flat.all_to_all(expected, rows, Tag("flat")).wait()
    found = two.there(rows, None, Tag("two"))
    assert torch.equal(found, expected)
    assert torch.equal(two.back(found, None, Tag("home")), rows)
    nodes, per_node = shape
    total = rows.numel() * ITEM
    assert one_step.sent_bytes() == total * 3 // 4
    assert two_steps.sent_bytes() == 2 * (total * (per_node - 1) // per_node + total * (nodes - 1) // nodes)


@ranks(4)
def test_parts_of_any_size_and_none(world_size):
    """Rank r has r + c + 2 k rows of kind k for rank c, and nothing at all for the one after it."""
    flat, two, (_, two_steps) = groups(2, 2)
    rank = flat.rank
    counts = torch.tensor([[(rank + c + 2 * k) * (c != (rank + 1) % 4) for k in range(2)] for c in range(4)])
    send = counts.sum(1).tolist()
    rows = torch.randn(sum(send), WIDTH, generator=torch.Generator().manual_seed(rank))
    incoming, numbers = two.count(counts, Tag("counts"))
    expected_counts = torch.empty_like(counts)
    flat.all_to_all(expected_counts, counts, Tag("flat counts")).wait()
    assert torch.equal(incoming, expected_counts)
    receive = incoming.sum(1).tolist()
    expected = rows.new_empty(sum(receive), WIDTH)
    flat.all_to_all(
        expected, rows, Tag("flat"), send=[n * WIDTH for n in send], receive=[n * WIDTH for n in receive]
    ).wait()
    with two_steps.measure() as sent:
        found = two.there(rows, numbers, Tag("two"))
    assert torch.equal(found, expected)
    other, node = rank ^ 1, rank // 2
    to_neighbour = sum(send[2 * n + other % 2] for n in range(2))
    onward = sum(row[1 - node] for row in numbers.passing)
    assert sent.total_bytes == (to_neighbour + onward) * WIDTH * ITEM
    assert torch.equal(two.back(found, numbers, Tag("home")), rows)
    nobody = torch.zeros_like(counts)
    _, none = two.count(nobody, Tag("no counts"))
    assert two.there(rows[:0], none, Tag("nothing")).shape == (0, WIDTH)


@ranks(4)
def test_the_largest_value_of_any_rank(world_size):
    _, two, _ = groups(2, 2)
    value = torch.tensor([dist.get_rank() * 7 % 5])
    two.largest(value, Tag("largest"))
    assert int(value) == 4
