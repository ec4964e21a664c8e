"""A capacity larger than the number of tokens is no error in any routing, and then nothing is dropped."""

import itertools

import torch
from torch import nn

import trilithon


def test_two_tokens_two_experts_and_room_for_eight():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(2, 4)
    for k, policy, drop, mode in itertools.product((1, 2), ("probs", "position", "rts"), (True, False), (True, False)):
        layer = trilithon.MoE(
            4, block, 2, k=k, capacity_factor=4.0, eval_capacity_factor=4.0, drop_tokens=drop, drop_policy=policy
        )
        y, balance, counts = layer.train(mode)(x)
        (y.sum() + balance).backward()
        assert int(counts.sum()) == 2 * k
        assert layer.last.kept.tolist() == counts.tolist()
        assert layer.last.capacity in (2, None)
