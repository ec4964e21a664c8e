import pytest
import torch

from trilithon.comm.collectives import Group
from trilithon.comm.ledger import Ledger
from trilithon.contracts import Collectives, ReduceOp, Tag

TAG = Tag("net", ("net.weight",), step=1)


def lone_group():
    ledger = Ledger()
    return Group(None, name="data", ledger=ledger), ledger


def test_it_implements_the_contract_and_needs_no_process_group():
    group, _ = lone_group()
    contract: Collectives = group
    assert (contract.rank, contract.world_size) == (0, 1)


def test_all_gather_copies_a_separate_shard_and_leaves_an_own_slice():
    group, _ = lone_group()
    full, shard = torch.zeros(3), torch.arange(3.0)
    handle = group.all_gather(full, shard, TAG)
    handle.wait()
    assert handle.done()
    assert torch.equal(full, shard)
    group.all_gather(full, full[:3], TAG).wait()
    assert torch.equal(full, shard)


@pytest.mark.parametrize(("scale", "accumulate", "factor"), [(1.0, False, 1), (0.5, False, 0.5), (1.0, True, 2)])
def test_reduce_scatter_into_its_own_memory(scale, accumulate, factor):
    group, _ = lone_group()
    full = torch.arange(4.0)
    group.reduce_scatter(full, full, TAG, scale=scale, accumulate=accumulate).wait()
    assert torch.equal(full, torch.arange(4.0) * factor)


@pytest.mark.parametrize("accumulate", [False, True])
def test_reduce_scatter_is_scale_cast_and_accumulate(accumulate):
    group, _ = lone_group()
    out = torch.ones(2)
    group.reduce_scatter(torch.tensor([2.0, 4.0]).bfloat16(), out, TAG, scale=0.25, accumulate=accumulate).wait()
    assert out.tolist() == ([1.5, 2.0] if accumulate else [0.5, 1.0])


def test_everything_else_changes_nothing_and_sends_nothing():
    group, ledger = lone_group()
    value = torch.tensor([[3.0, 4.0]])
    for op in ReduceOp:
        group.all_reduce(value, TAG, op).wait()
    group.broadcast(value, 0, TAG).wait()
    group.barrier(TAG)
    assert value.tolist() == [[3.0, 4.0]]
    assert group.all_gather_object({"a": 1}, TAG) == [{"a": 1}]
    assert ledger.sent_bytes() == 0
    assert ledger.calls("all_reduce") == 3


def test_our_own_mistakes_are_asserted():
    group, _ = lone_group()
    square = torch.zeros(2, 3)
    with pytest.raises(AssertionError):
        group.all_reduce(square.t(), TAG)
    with pytest.raises(AssertionError):
        group.all_gather(torch.zeros(4), torch.zeros(3), TAG)
    with pytest.raises(AssertionError, match="float64"):
        group.all_gather(torch.zeros(3), torch.zeros(3, dtype=torch.float64), TAG)
