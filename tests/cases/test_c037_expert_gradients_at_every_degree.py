"""Gradients are the same whatever the expert-parallel degree, and the divisor is the number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trilithon
from trilithon.testing import ranks


def model(ep_size: int) -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return nn.Sequential(nn.Linear(8, 8), trilithon.MoE(8, block, num_experts=4, ep_size=ep_size, drop_tokens=False))


@pytest.mark.parametrize("stage", [0, 1, 2])
@ranks(4)
def test_gradients_do_not_depend_on_the_degree(world_size, stage):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    plain = model(1)
    sum(plain(part)[0].square().mean() for part in x.chunk(world_size)).div(world_size).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for ep_size in (1, 2, 4):
        engine = trilithon.initialize(model(ep_size), {"zero": {"stage": stage}, "optimizer": "sgd"})
        engine.backward(engine(x.chunk(world_size)[dist.get_rank()])[0].square().mean())
        for name, grad in engine.view("grad"):
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-8)
        engine.step()
        engine.close()
