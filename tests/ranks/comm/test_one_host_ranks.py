import gc
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from trilithon.comm import collectives, one_host
from trilithon.comm.collectives import Group
from trilithon.comm.one_host import OneHost
from trilithon.comm.point_to_point import PointToPoint
from trilithon.contracts import Tag
from trilithon.errors import CollectiveError
from trilithon.testing import Ending, ranks, run_ranks_raw

TAG = Tag("net", ("net.weight",))
NUMEL = 3000


def both_transports():
    one_host._LARGE_BYTES = 4096  # so that a small test takes the path of large tensors
    messages = Group(dist.new_group(), name="messages")
    direct = Group(dist.new_group(), name="direct", shared_memory=True)
    assert isinstance(direct._pairs, OneHost)
    return messages, direct


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_both_transports_give_the_same_bits_and_count_the_same_bytes(world_size, dtype):
    results = []
    for group in both_transports():
        generator = torch.Generator().manual_seed(group.rank)
        full = torch.randn(world_size * NUMEL, generator=generator, dtype=torch.float64).to(dtype)
        gathered = [torch.zeros(world_size * NUMEL, dtype=dtype) for _ in range(3)]
        out, total = torch.ones(NUMEL), full.repeat(5)
        with group.ledger.measure() as sent:
            handles = [group.all_gather(whole, full[k:][:NUMEL], TAG) for k, whole in enumerate(gathered)]
            handles.append(group.reduce_scatter(full, out, TAG, scale=1 / 3, accumulate=True))
            handles.append(group.all_reduce(total, TAG))
            for handle in reversed(handles):
                handle.wait()
        results.append(([*gathered, out, total], sent))
    (by_message, counted), (by_reading, counted_too) = results
    assert all(torch.equal(a, b) for a, b in zip(by_message, by_reading))
    assert counted == counted_too
    assert by_reading[0].count_nonzero() > NUMEL


@ranks(3)
def test_one_rank_that_cannot_read_makes_everybody_use_messages(world_size):
    if dist.get_rank() == 1:
        collectives.can_read = lambda *_: False
    group = Group(dist.group.WORLD, name="data", shared_memory=True)
    assert type(group._pairs) is PointToPoint
    full = torch.zeros(3)
    group.all_gather(full, torch.tensor([float(group.rank)]), TAG).wait()
    assert full.tolist() == [0, 1, 2]


@ranks(2)
def test_the_reading_thread_ends_with_its_group(world_size):
    def readers():
        return [thread for thread in threading.enumerate() if thread.name == "trilithon-reader"]

    messages, direct = both_transports()
    direct.all_reduce(torch.ones(100_000), TAG).wait()
    (reader,) = readers()
    direct.barrier(TAG)
    del messages, direct
    gc.collect()
    reader.join(timeout=5)
    assert not reader.is_alive()


def lose_rank_1():
    _, group = both_transports()
    group.barrier(TAG)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match=r"lost its connection to rank 1 in call .*, all_gather of 6000 float32"):
        group.all_gather(torch.zeros(2 * NUMEL), torch.zeros(NUMEL), TAG).wait()
    return len(os.listdir("/dev/shm"))


def test_a_killed_rank_is_named_and_leaves_nothing_behind():
    before = len(os.listdir("/dev/shm"))
    survivor, killed = run_ranks_raw(lose_rank_1, 2, timeout_s=30)
    assert (survivor.ending, killed.exit_code) == (Ending.RETURNED, -signal.SIGKILL), survivor.output
    assert survivor.value == before
