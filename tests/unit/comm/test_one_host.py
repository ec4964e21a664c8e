import os

import pytest
import torch

from trilithon.comm.one_host import can_read, host_identity, read_memory
from trilithon.comm.point_to_point import ReceiveBuffers

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/ns/pid"), reason="reads memory as Linux allows it")


def test_memory_is_read_into_place():
    source, into = torch.arange(10_000), torch.zeros(10_000, dtype=torch.int64)
    read_memory(os.getpid(), source.data_ptr() + 8, into[:9_999])
    assert into.tolist() == [*range(1, 10_000), 0]


def test_what_cannot_be_read_says_so():
    ended = os.fork()
    if ended == 0:
        os._exit(0)
    os.waitpid(ended, 0)
    with pytest.raises(ProcessLookupError):
        read_memory(ended, 4096, torch.zeros(8))
    with pytest.raises(OSError, match="Bad address"):
        read_memory(os.getpid(), 8, torch.zeros(8))


def test_a_token_proves_that_the_process_is_the_right_one():
    token = torch.arange(16, dtype=torch.uint8)
    assert can_read(os.getpid(), token.data_ptr(), bytes(range(16)))
    assert not can_read(os.getpid(), token.data_ptr(), bytes(16))
    assert not can_read(os.getpid(), 8, bytes(16))


def test_the_identity_of_a_host_is_stable():
    assert host_identity() == host_identity() != ""


def test_receive_buffers_are_used_again_and_only_the_largest_stay():
    buffers = ReceiveBuffers(kept=2)
    first, kept = buffers.take(100, torch.float32)
    assert first.shape == (100,)
    buffers.give(kept)
    again, same = buffers.take(10, torch.float64)
    assert again.data_ptr() == first.data_ptr()
    others = [buffers.take(n, torch.uint8)[1] for n in (64, 1000)]
    for buffer in (same, *others):
        buffers.give(buffer)
    assert buffers.bytes == 448 + 1024
    buffers.clear()
    assert buffers.bytes == 0


def test_an_empty_buffer_is_fine():
    buffers = ReceiveBuffers()
    nothing, buffer = buffers.take(0, torch.bfloat16)
    assert nothing.numel() == 0
    buffers.give(buffer)
