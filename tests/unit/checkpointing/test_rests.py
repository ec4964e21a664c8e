"""Places where inputs rest: they give back the same bits, in memory that is made once, and count what they hold."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import nn

from trilithon.checkpointing import Buffers, ContiguousRest, DeviceRest, HostRest, recomputed
from trilithon.checkpointing.rest import Form
from trilithon.errors import ConfigError
from trilithon.testing.live_bytes import LiveBytes

RESTS = {
    "device": DeviceRest,
    "host": HostRest,
    "contiguous": lambda: ContiguousRest(3),
    "contiguous host": lambda: HostRest(Buffers(3, off_device=True)),
}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(3, 8)[:, ::2],
        torch.randn(3, 1).expand(3, 5),
        torch.randn(4, 4)[1:3],
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(2, 1, 3, 1).transpose(0, 1),
    ],
    ids=["plain", "transposed", "permuted", "strided", "expanded", "rows", "scalar", "empty", "four axes"],
)
def test_a_flat_copy_becomes_the_same_tensor_again(tensor):
    form = Form(tensor)
    flat = form.flat(tensor)
    assert flat.shape == (tensor.numel(),)
    again = form.shaped(flat.clone())
    assert torch.equal(again, tensor)
    if tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride():
        assert again.stride() == tensor.stride() or tensor.numel() < 2


@pytest.mark.parametrize("name", RESTS)
def test_every_place_gives_the_values_back_as_a_leaf_that_asks_as_before(name):
    rest = RESTS[name]()
    rest.begin("block")
    x, mask = torch.randn(3, 5).t().requires_grad_(), torch.tensor([True, False])
    kept = [rest.keep(x), rest.keep(mask), rest.keep(x)]
    for _ in range(2):  # a graph may be run backwards twice
        again, mask_again, _ = [one.fetch() for one in kept]
        assert torch.equal(again, x) and again.is_leaf and again.requires_grad and again.stride() == x.stride()
        assert torch.equal(mask_again, mask) and not mask_again.requires_grad
    tier = "host" if "host" in name else "device"
    room = 3 * 64 if "contiguous" in name else 60  # three places of 60 bytes, aligned
    assert rest.bytes().get(tier, 0) == room + 2 * (tier == "device")
    assert rest.bytes().get("device", 0) == 2 + (room if tier == "device" else 0)  # the mask stays where it is
    assert rest.peak_bytes == 60 or name == "device"  # x counts once
    del kept, again, mask_again, _
    gc.collect()
    assert rest.bytes().get(tier, 0) == (0 if name == "device" else room)  # memory that is used again
    rest.close()
    assert rest.bytes() == {}


def test_buffers_are_made_once_and_leave_no_gaps():
    buffers = Buffers(4)
    inputs = [torch.full((16,), float(i)) for i in range(4)]  # 64 bytes each
    first = [buffers.take(like)[0] for like in inputs]
    assert buffers.count == 1 and buffers.bytes == 4 * 64
    addresses = [flat.data_ptr() for flat in first]
    assert [b - a for a, b in itertools.pairwise(addresses)] == [64] * 3  # side by side
    for flat in reversed(first):  # as backward does
        buffers.give_back(flat, None)
    large, _ = buffers.take(torch.empty(64))  # what was four places is one again
    assert large.data_ptr() == addresses[0] and buffers.count == 1
    buffers.give_back(large, None)
    assert [buffers.take(like)[0].data_ptr() for like in inputs] == addresses
    further, _ = buffers.take(inputs[0])
    assert buffers.count == 2 and buffers.bytes == 8 * 64  # `number` was too small
    buffers.give_back(further, None)
    assert buffers.take(torch.empty(3, dtype=torch.bfloat16))[0].dtype == torch.bfloat16 and buffers.count == 2
    with pytest.raises(ConfigError, match=r"recompute\.number=0"):
        Buffers(0)


def test_a_place_is_not_used_again_while_backward_may_read_it():
    """The product of a block saves its input; the place of that input is given back before the saved one is gone."""
    rest, layer = ContiguousRest(1), nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    held = []

    def block(t):
        held.append(t)
        return layer(t).square()

    y = recomputed(block, x, rest=rest)
    y.sum().backward()
    y = held[0] = None
    gc.collect()
    recomputed(layer, torch.zeros(4, 8, requires_grad=True), rest=rest)  # takes the place
    assert rest.memory.count == 1
    assert torch.equal(held[1], x)


@pytest.mark.parametrize("name", ["contiguous", "contiguous host"])
def test_memory_is_asked_for_in_the_first_step_only(name):
    rest = RESTS[name]()
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    seen = set()
    for _ in range(3):
        x = torch.randn(4, 8, requires_grad=True)
        for layer in layers:
            x = recomputed(layer, x, rest=rest)
        memory = rest.memory if name == "contiguous" else rest.link.memory
        seen.add((memory.count, memory.bytes))
        x.square().sum().backward()
        del x
    assert seen == {(1, 3 * 128)}


def test_live_bytes_counts_what_was_made_inside_and_is_still_there():
    outside = torch.ones(100)
    with LiveBytes() as live:
        inside = outside + 1
        view = outside[:50]
        assert live.bytes == 400
        other = inside * 2
        assert live.bytes == 800
        del inside
        assert live.bytes == 400
        del other, view
        assert live.bytes == 0
    assert live.peak_bytes == 800
