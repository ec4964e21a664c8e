import pytest
import torch
import torch.distributed as dist

from trilithon.comm.collectives import Group
from trilithon.comm.mesh import init_distributed, make_mesh, own_process_group
from trilithon.contracts import ReduceOp, Tag
from trilithon.errors import CollectiveError, ConfigError
from trilithon.testing import ranks

TAG = Tag("net", ("net.weight",), step=1, micro_step=0)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def data_group(**options):
    return Group(dist.group.WORLD, name="data", **options)


def everyones(numel, dtype, world_size):
    """What each rank holds: every rank can build all of it and so compute the expected result by itself."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
    return [torch.randn(numel, generator=g, dtype=torch.float64).to(dtype) for g in generators]


def plain_sum(values):
    wide = torch.float64 if values[0].dtype is torch.float64 else torch.float32
    total = values[0].to(wide)
    for value in values[1:]:
        total = total + value.to(wide)
    return total


@ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter_equals_the_sum_in_rank_order_bit_for_bit(world_size, dtype):
    group = data_group()
    for numel in (0, 1, 5, 70_001):
        fulls = everyones(world_size * numel, dtype, world_size)
        mine = slice(group.rank * numel, (group.rank + 1) * numel)
        expected = plain_sum(fulls)[mine]
        for out_dtype in {dtype, torch.float32}:
            out = torch.ones(numel, dtype=out_dtype)
            group.reduce_scatter(fulls[group.rank].clone(), out, TAG, scale=1 / 3, accumulate=True).wait()
            assert torch.equal(out, (1 + expected * (1 / 3)).to(out_dtype))
        full = fulls[group.rank].clone()
        group.reduce_scatter(full, full[mine], TAG).wait()
        assert torch.equal(full[mine], expected.to(dtype))
        others = torch.cat([full[: mine.start], full[mine.stop :]])
        assert torch.equal(others, torch.cat([fulls[group.rank][: mine.start], fulls[group.rank][mine.stop :]]))


@ranks(3)
def test_reduce_scatter_does_not_depend_on_how_it_is_cut(world_size):
    group = data_group()
    rows = [full.view(world_size, 1000) for full in everyones(world_size * 1000, torch.bfloat16, world_size)]
    whole, parts = torch.empty(1000), torch.empty(1000)
    group.reduce_scatter(rows[group.rank].contiguous(), whole, TAG).wait()
    for start, stop in ((0, 1), (1, 400), (400, 1000)):
        group.reduce_scatter(rows[group.rank][:, start:stop].contiguous(), parts[start:stop], TAG).wait()
    assert torch.equal(whole, parts)


@ranks(2, 4)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.uint8, torch.bool])
def test_several_all_gathers_in_flight_do_not_mix_whatever_the_order_of_waits(world_size, dtype):
    group = data_group()
    wholes = [(10 * torch.arange(world_size * 6) + k).to(dtype) for k in range(4)]
    fulls = [torch.zeros(world_size * 6, dtype=dtype) for _ in wholes]
    handles = []
    for k, (full, whole) in enumerate(zip(fulls, wholes)):
        shard = whole[group.rank * 6 : (group.rank + 1) * 6]
        if k % 2:
            full[group.rank * 6 : (group.rank + 1) * 6] = shard
            shard = full[group.rank * 6 : (group.rank + 1) * 6]
        handles.append(group.all_gather(full, shard, TAG))
    for k in reversed(range(4)):
        handles[k].wait()
        handles[k].wait()
        assert handles[k].done()
        assert torch.equal(fulls[k], wholes[k])


@ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_reduce_of_few_and_of_many_elements_is_the_same_arithmetic(world_size, dtype):
    group = data_group()
    for numel in (0, 1, 7, 50_001):  # the last one goes in slices, and they are uneven
        values = everyones(numel, dtype, world_size)
        total = values[group.rank].clone()
        group.all_reduce(total, TAG).wait()
        assert torch.equal(total, plain_sum(values).to(dtype))
        largest = values[group.rank].clone()
        group.all_reduce(largest, TAG, ReduceOp.MAX).wait()
        assert torch.equal(largest, torch.stack(values).max(0).values)


@ranks(3)
def test_flags_and_counts(world_size):
    group = data_group()
    one_saw_it = torch.tensor([[group.rank == 1]])
    group.all_reduce(one_saw_it, TAG, ReduceOp.MAX).wait()
    assert one_saw_it.item()
    count = torch.tensor(2**40 + group.rank)
    group.all_reduce(count, TAG).wait()
    assert count.item() == 3 * 2**40 + 3
    with pytest.raises(CollectiveError, match=r"SUM does not support torch.bool"):
        group.all_reduce(one_saw_it, TAG)


@ranks(3)
def test_broadcast_objects_and_barrier(world_size):
    group = data_group()
    value = torch.full((2, 3), float(group.rank))
    group.broadcast(value, 1, TAG).wait()
    assert torch.equal(value, torch.ones(2, 3))
    mine = {"rank": group.rank, "text": "x" * group.rank}
    assert group.all_gather_object(mine, TAG) == [{"rank": r, "text": "x" * r} for r in range(world_size)]
    group.barrier(TAG)


@ranks(2, 4)
def test_the_ledger_holds_the_formulas_to_the_integer(world_size):
    group = data_group()
    n, peers = 10, world_size - 1
    with group.ledger.measure() as sent:
        group.all_gather(torch.zeros(world_size * n), torch.zeros(n), TAG).wait()
        group.reduce_scatter(torch.zeros(world_size * n).bfloat16(), torch.zeros(n), TAG).wait()
        group.all_reduce(torch.zeros(n), TAG).wait()
        group.broadcast(torch.zeros(n), 0, TAG).wait()
    assert sent.all_gather_bytes == peers * n * 4
    assert sent.reduce_scatter_bytes == peers * n * 2
    assert sent.all_reduce_bytes == 2 * peers * n * 4 // world_size
    assert sent.broadcast_bytes == n * 4
    assert sent.calls == 4
    assert sent.total_bytes == (
        sent.all_gather_bytes + sent.reduce_scatter_bytes + sent.all_reduce_bytes + sent.broadcast_bytes
    )


@ranks(2)
def test_two_groups_may_be_in_flight_in_different_orders(world_size):
    gathers = Group(dist.new_group(), name="gathers")
    reductions = Group(dist.new_group(), name="reductions")
    full, out = torch.zeros(2), torch.zeros(1)
    ones = torch.ones(2)

    def gather():
        return gathers.all_gather(full, torch.tensor([float(gathers.rank)]), TAG)

    def reduce():
        return reductions.reduce_scatter(ones, out, TAG)

    first, second = (gather, reduce) if gathers.rank == 0 else (reduce, gather)
    handles = [first(), second()]
    for handle in handles:
        handle.wait()
    assert (full.tolist(), out.tolist()) == ([0.0, 1.0], [2.0])


@ranks(4)
def test_an_axis_of_a_mesh_has_its_own_ranks(world_size):
    mesh = make_mesh({"data": 2, "tensor": 2})
    rank = dist.get_rank()
    for axis, members in (("data", [rank % 2, rank % 2 + 2]), ("tensor", [rank // 2 * 2, rank // 2 * 2 + 1])):
        group = Group(own_process_group(mesh, axis), name=axis)
        assert group.all_gather_object(rank, TAG) == members
    with pytest.raises(ConfigError, match="data=3 has 3 ranks, but 4 are running"):
        make_mesh({"data": 3})


@ranks(2, init=False)
def test_init_distributed_follows_the_environment_once(world_size):
    assert init_distributed(timeout_s=30.0)
    assert init_distributed()
    assert dist.get_backend() == "gloo"
    assert dist.get_world_size() == world_size


@ranks(2, timeout_s=30)
def test_a_lost_connection_names_the_call_and_the_rank(world_size):
    group = data_group()
    group.barrier(TAG)
    if group.rank == 0:
        with pytest.raises(
            CollectiveError, match=r"lost its connection to rank 1 in call 1, all_gather of 2 float32 for net"
        ):
            group.all_gather(torch.zeros(2), torch.zeros(1), TAG).wait()
    else:
        dist.destroy_process_group()


@ranks(2, timeout_s=30)
def test_a_connection_that_was_lost_before_the_call_is_reported_by_wait(world_size):
    group = data_group()
    group.barrier(TAG)
    if group.rank == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(CollectiveError, match="lost its connection to rank 1 in call 1"):
        group.barrier(TAG)
    handle = group.all_gather(torch.zeros(2), torch.zeros(1), TAG)  # issuing does not fail: a handle is still there
    with pytest.raises(CollectiveError, match="lost its connection to rank 1 in call 2"):
        handle.wait()
