"""Optimizers by name: alone they are those of torch, and in an engine their groups stay live."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trilithon.compat import deepspeed
from trilithon.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from trilithon.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from trilithon.compat.deepspeed.ops.lamb import FusedLamb
from trilithon.compat.deepspeed.ops.lion import DeepSpeedCPULion
from trilithon.errors import ProtocolError

PAIRS = {
    "adamw": (lambda p: FusedAdam(p, lr=0.1, weight_decay=0.2), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.2)),
    "adam": (
        lambda p: DeepSpeedCPUAdam(p, lr=0.1, weight_decay=0.2, adamw_mode=False),
        lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.2),
    ),
    "adagrad": (lambda p: DeepSpeedCPUAdagrad(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
}


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", PAIRS)
def test_alone_they_are_torchs_also_after_their_state_went_to_another_one(kind):
    mine, torchs = PAIRS[kind]
    net = nn.Linear(5, 3)
    plain = copy.deepcopy(net)
    unused = nn.Parameter(torch.ones(2))
    optimizer, reference = mine([*net.parameters(), unused]), torchs(plain.parameters())
    for index in range(4):
        x = torch.randn(4, 5)
        step(net, optimizer, x)
        step(plain, reference, x)
        if index == 1:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = mine([*net.parameters(), unused])
            optimizer.load_state_dict(state)
    torch.testing.assert_close(net.weight, plain.weight, rtol=1e-6, atol=1e-7)  # 4 steps in fp32
    assert unused.tolist() == [1.0, 1.0]


def test_a_bf16_parameter_is_moved_through_an_fp32_master():
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = FusedAdam([param], lr=1e-3)
    for _ in range(3):  # each step moves by 1e-3, below half a unit of bf16 at 1
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert param.tolist() == [0.99609375] * 8  # 1 - 0.003 rounded to bf16


def test_groups_of_another_optimizer_are_taken_over_as_they_are():
    """As accelerate does: a scheduler over the first one keeps its effect."""
    net = nn.Linear(3, 3)
    first = torch.optim.AdamW(net.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(first, lambda _: 0.5)
    first.step()  # without gradients: torch's schedulers ask that it was called before
    second = DeepSpeedCPUAdam(first.param_groups, lr=0.9, weight_decay=0.0, adamw_mode=True)
    assert second.param_groups[0] is first.param_groups[0]
    schedule.step()
    assert second.param_groups[0]["lr"] == 0.5


def test_lamb_and_lion_have_their_arguments_and_their_state():
    for optimizer, fields in (
        (FusedLamb([nn.Parameter(torch.ones(2))], max_coeff=5.0, min_coeff=0.5), {"step", "exp_avg", "exp_avg_sq"}),
        (DeepSpeedCPULion([nn.Parameter(torch.ones(2))]), {"step", "exp_avg"}),
    ):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        optimizer.step()
        assert set(optimizer.state_dict()["state"][0]) == fields
    assert FusedLamb([nn.Parameter(torch.ones(2))], max_coeff=5.0).param_groups[0]["max_ratio"] == 5.0


@pytest.mark.parametrize(
    "make",
    [
        lambda p: FusedAdam(p, amsgrad=True),
        lambda p: DeepSpeedCPUAdam(p, amsgrad=True),
        lambda p: FusedLamb(p, amsgrad=True),
        lambda p: FusedLamb(p, eps_inside_sqrt=True),
        lambda p: DeepSpeedCPUAdam(p, fp32_optimizer_states=False),
    ],
)
def test_what_the_rules_do_not_have_is_refused(make):
    with pytest.raises(RuntimeError, match=r"support|not in this version"):
        make([nn.Parameter(torch.ones(2))])


def test_inside_an_engine_the_engine_makes_the_steps_and_the_rate_of_the_group_counts():
    net = nn.Linear(4, 2)
    own = FusedAdam(net.parameters(), lr=0.1)
    block = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    engine, optimizer, *_ = deepspeed.initialize(model=net, optimizer=own, config=block, dist_init_required=False)
    assert optimizer.optimizer is own and isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
    assert isinstance(type("Own", (type(optimizer),), {})(engine, own), deepspeed.DeepSpeedOptimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    before = engine.native.state_dict()["weight"]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert torch.equal(engine.native.state_dict()["weight"], before)
    with pytest.raises(ProtocolError, match=r"engine\.step"):
        own.step()
    engine.destroy()


def test_an_optimizer_that_made_steps_of_its_own_is_refused():
    net = nn.Linear(4, 2)
    own = FusedAdam(net.parameters(), lr=0.1)
    step(net, own, torch.ones(1, 4))
    with pytest.raises(ProtocolError, match="already made 1 steps"):
        deepspeed.initialize(
            model=net, optimizer=own, config={"train_micro_batch_size_per_gpu": 1}, dist_init_required=False
        )
