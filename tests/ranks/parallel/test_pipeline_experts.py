"""Whole experts in the stages of a pipeline train as in one process; those that talk to other ranks are refused."""

import pytest
import torch

import trilithon
from trilithon.engine.build import initialize
from trilithon.errors import ConfigError
from trilithon.models import GPT, preset
from trilithon.testing import ranks, run_ranks

MICROS = 2


def gpt(ep_size=1):
    torch.manual_seed(0)
    return GPT(
        preset(
            "nano", vocab_size=48, context=16, width=16, num_layers=4, experts=4, top_k=2, ep_size=ep_size,
            capacity_factor=None, balance_coeff=0.05,
        )
    )  # fmt: skip


def train(mesh):
    settings = {"mesh": mesh, "zero": {"stage": 1}, "batch": {"micro_size": 2, "accumulation": MICROS}}
    with initialize(gpt(), {**settings, "optimizer": {"kind": "adam", "lr": 1e-2, "eps": 1e-6}}) as engine:
        generator, losses = torch.Generator().manual_seed(1), []
        for _ in range(3):
            tokens = torch.randint(48, (MICROS, 2, 17), generator=generator)
            losses.append(float(engine.train_step([(one[:, :-1], one[:, 1:]) for one in tokens])))
        return losses, {name: value.clone() for name, value in engine.full_parameters()}


def test_two_stages_with_experts_equal_one_process():
    """The balance loss of each stage's experts joins its own backward."""
    alone = train({})
    for losses, parameters in run_ranks(train, 2, {"pipe": 2}):
        assert losses == pytest.approx(alone[0], rel=1e-5)
        for name, value in parameters.items():
            torch.testing.assert_close(value, alone[1][name], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("mesh", "ep_size"), [({"data": 2}, 2), ({"tensor": 2}, 1)])
@ranks(4)
def test_experts_that_talk_to_other_ranks_are_refused_by_all(world_size, mesh, ep_size):
    with pytest.raises(ConfigError, match=r"mesh\.pipe is above 1, and ranks .* share tokens out.*Use ep_size=1"):
        initialize(gpt(ep_size), {"mesh": {"pipe": 2, **mesh}, "batch": {"micro_size": 2}})


@ranks(2)
@pytest.mark.parametrize("dense_stage", [False, True])
def test_lamb_with_experts_in_stages_is_refused_by_all_ranks(world_size, dense_stage):
    """Its table of norms has a row for each expert, and a stage knows its own experts only."""
    torch.manual_seed(0)
    block = [torch.nn.Linear(8, 8), trilithon.MoE(8, trilithon.moe.FeedForward(8, 16), 2)]
    layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), *block] if dense_stage else [*block, *block]
    model = trilithon.PipelineModule(layers, num_stages=2, partition_method="uniform")
    with pytest.raises(ConfigError, match=r"optimizer lamb .* experts .* use adamw"):
        initialize(model, {"optimizer": {"kind": "lamb", "lr": 1e-2}})
