"""Where an update is due, said by the caller; losses that are divided already; gradients that are dropped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import trilithon
from trilithon.errors import ProtocolError


def engine_of(net: nn.Module, stage: int = 0, accumulation: int = 4) -> trilithon.Engine:
    settings = {
        "batch": {"micro_size": 1, "accumulation": accumulation},
        "zero": {"stage": stage},
        "optimizer": {"kind": "sgd", "lr": 0.1},
    }
    return trilithon.initialize(net, settings)


def loss_of(model: object, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[operator]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_boundary_by_hand_ends_a_window_early_or_keeps_it_open(stage):
    net = nn.Linear(3, 2)
    plain = copy.deepcopy(net)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine, batches = engine_of(net, stage, accumulation=2), torch.randn(4, 1, 3)
    engine.boundary = False
    for index, x in enumerate(batches):
        engine.boundary = index == 3
        engine.backward(loss_of(engine, x), share=1 / 4)
        assert engine.step() == (index == 3)
        (loss_of(plain, x) / 4).backward()
    reference.step()
    engine.boundary = None
    for x in batches[:2]:  # counted again
        engine.backward(loss_of(engine, x))
        changed = engine.step()
    assert changed
    reference.zero_grad()
    sum(loss_of(plain, x) / 2 for x in batches[:2]).backward()
    reference.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    engine.close()


def test_dropped_gradients_do_not_count():
    net = nn.Linear(3, 2)
    before = net.weight.detach().clone()
    engine = engine_of(net, 1, accumulation=1)
    engine.backward(loss_of(engine, torch.ones(1, 3)))
    engine.drop_gradients()
    with pytest.raises(ProtocolError, match="without a backward"):
        engine.step()
    assert torch.equal(engine.state_dict()["weight"], before)
    engine.close()


def test_a_share_is_positive_and_no_weight_beside_it():
    engine = engine_of(nn.Linear(3, 2))
    for arguments in ({"share": 0.0}, {"share": 0.5, "weight": 2.0}):
        with pytest.raises(ProtocolError, match="share="):
            engine.backward(loss_of(engine, torch.ones(1, 3)), **arguments)
    engine.close()
