"""Capacity holds with and without random token selection; tokens past it are dropped in order and give zero rows."""

import torch
from torch import nn

import trilithon


def crowded(use_rts: bool, **options):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    layer = trilithon.MoE(4, block, num_experts=4, capacity_factor=1.0, min_capacity=1, use_rts=use_rts, **options)
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[0] = 1.0
    return layer


def test_five_tokens_that_all_want_expert_0():
    x = torch.rand(5, 4) + 0.1
    layer = crowded(use_rts=False)
    y, _, counts = layer(x)
    assert counts.tolist() == [5, 0, 0, 0]
    assert layer.last.capacity == 2
    assert layer.last.kept.tolist() == [2, 0, 0, 0]
    assert y[:2].any(dim=1).all() and not y[2:].any()
    lottery = crowded(use_rts=True)
    y, _, _ = lottery(x)
    assert lottery.last.kept.tolist() == [2, 0, 0, 0]
    assert int(y.any(dim=1).sum()) == 2


def test_a_dropped_token_keeps_the_residual_branch():
    layer = crowded(use_rts=False, use_residual=True)
    x = torch.rand(5, 4) + 0.1
    share = layer.coefficient(x).softmax(1)[:, 1:]
    torch.testing.assert_close(layer(x)[0][2:], (share * layer.mlp(x))[2:])
