"""Experts spread over ranks are all in the state that is saved, once, and each returns to its owner at any degree."""

import torch.distributed as dist
from torch import nn

import trilithon
from trilithon.testing import ranks


def model(ep_size: int) -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return nn.Sequential(trilithon.MoE(4, block, num_experts=4, ep_size=ep_size))


@ranks(2)
def test_distinct_constant_experts_survive_a_change_of_degree(world_size):
    saved = model(2)
    engine = trilithon.initialize(saved, {"optimizer": "adam"})
    mine = saved[0].experts
    with trilithon.zero.gathered(mine, modify=0):
        for param in mine.parameters():
            for index in range(mine.here):
                param.data[index] = 1.0 + mine.first + index
    state = engine.state_dict()
    engine.close()
    stacks = [value for name, value in state.items() if ".experts." in name]
    assert len(stacks) == 4
    for value in stacks:
        assert [set(expert.flatten().tolist()) for expert in value] == [{1.0}, {2.0}, {3.0}, {4.0}]
    for ep_size in (2, 1):
        loaded = model(ep_size)
        loaded.load_state_dict(state)
        engine = trilithon.initialize(loaded, {"optimizer": "adam"})
        held = {float(value) for value in loaded[0].experts.get_parameter("0.bias")[:, 0]}
        assert held == ({1.0, 2.0} if dist.get_rank() == 0 else {3.0, 4.0}) or (ep_size == 1 and len(held) == 4)
        engine.close()
