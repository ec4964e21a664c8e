"""What is no longer silent: code that looks for gradients in param.grad while an engine holds them."""

import pytest
import torch
from torch import nn

import trilithon
from trilithon.errors import ProtocolError


def engine_after_backward(**config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    engine = trilithon.initialize(model, {"optimizer": {"kind": "sgd", "lr": 0.1}, **config})
    engine.backward(engine(torch.ones(2, 4)).mean())
    return engine


@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_by_hand_is_refused_with_the_setting_to_use(foreach):
    with engine_after_backward() as engine, pytest.raises(ProtocolError, match=r"0\.weight.*clip_norm"):
        nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0, foreach=foreach)


def test_the_step_of_an_optimizer_beside_the_engine_is_refused():
    class Mine(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-0.1)

    with engine_after_backward() as engine:
        beside = Mine(engine.module.parameters())
        with pytest.raises(ProtocolError, match=r"held by an engine.*engine\.step"):
            beside.step()


def test_a_norm_by_hand_is_refused_and_metadata_can_be_read():
    with engine_after_backward() as engine:
        grad = engine.module[0].weight.grad
        assert grad.shape == (3, 4) and grad.dtype == torch.float32 and grad.numel() == 12
        assert "0.weight" in repr(grad)
        with pytest.raises(ProtocolError, match=r"0\.weight"):
            grad.norm()
        with pytest.raises(ProtocolError, match=r"0\.weight"):
            torch.stack([g.grad.square().sum() for g in engine.module.parameters()])


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_gradients_by_hand_does_no_harm(to_none):
    with engine_after_backward() as engine, engine_after_backward() as untouched:
        engine.module.zero_grad(set_to_none=to_none)
        assert engine.step() and untouched.step()
        for (_, one), (_, other) in zip(engine.full_parameters(), untouched.full_parameters(), strict=True):
            assert torch.equal(one, other)


def test_it_is_gone_after_the_step_and_after_closing():
    engine = engine_after_backward()
    engine.step()
    assert all(p.grad is None for p in engine.module.parameters())
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.close()
    assert all(p.grad is None for p in engine.module.parameters())


def test_backward_of_another_engine_through_these_parameters_is_not_disturbed():
    with engine_after_backward() as judge:
        torch.manual_seed(1)
        writer = trilithon.initialize(nn.Linear(2, 4), {"optimizer": {"kind": "sgd", "lr": 0.1}})
        before = [value for _, value in writer.full_parameters()]
        writer.backward(judge(writer(torch.ones(3, 2))).mean())
        assert writer.step() and judge.step()
        assert not torch.equal(before[0], next(iter(writer.full_parameters()))[1])
        writer.close()


def test_a_forgotten_step_is_told(caplog):
    torch.manual_seed(0)
    with trilithon.initialize(nn.Linear(2, 1), {"optimizer": {"kind": "sgd", "lr": 0.1}}) as engine:
        for _ in range(20):
            engine.backward(engine(torch.ones(1, 2)).mean())
    assert [record.message for record in caplog.records if "16 backwards" in record.message]
