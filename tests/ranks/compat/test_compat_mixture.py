"""deepspeed.moe.layer.MoE and deepspeed.utils.groups under an engine whose experts are on different ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import trilithon
from trilithon.compat.deepspeed.moe.layer import MoE
from trilithon.compat.deepspeed.runtime.zero.parameter_offload import adopt, release
from trilithon.compat.deepspeed.utils import groups
from trilithon.testing import ranks


class Model(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], ep_size: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.moe = kind(8, nn.Linear(8, 8), num_experts=4, ep_size=ep_size, k=1, use_rts=False, drop_tokens=False)

    def forward(self, x: Tensor) -> Tensor:
        y, balance, _ = self.moe(self.first(x))
        return y.square().mean() + 0.01 * balance


def trained(kind: Callable[..., nn.Module], ep_size: int, x: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = Model(kind, ep_size)
    with trilithon.initialize(model, {"optimizer": {"kind": "sgd", "lr": 0.5}, "zero": {"stage": 1}}) as engine:
        adopt(engine)
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
        if ep_size > 1:
            assert groups._get_expert_parallel_world_size("ep_size_2") == 2
            assert groups._get_expert_parallel_rank("ep_size_2") == dist.get_rank()
            assert dist.get_process_group_ranks(groups._get_expert_parallel_group("ep_size_2")) == [0, 1]
            assert groups._get_expert_data_parallel_world_size("ep_size_2") == 1
        whole = dict(engine.full_parameters())
        release(engine)
    return whole


@ranks(2)
def test_a_layer_of_experts_trains_as_our_own_and_its_groups_are_found():
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    same = partial(trilithon.MoE, expert_init="copy", aux_loss_counts="first")  # DeepSpeed's defaults
    ours, theirs = trained(same, 2, x), trained(MoE, 2, x)
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
