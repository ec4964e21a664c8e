"""An engine in one process without a process group: every stage is plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trilithon
from against_plain import SGD, STAGES, engine_for, train_engine, train_plainly
from trilithon.errors import ConfigError, ProtocolError
from trilithon.testing.models import MLP, SharedLayerNet, TinyGPT
from trilithon.testing.parity import assert_same_training, token_batches, tolerance, vector_batches


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make", [MLP, SharedLayerNet, TinyGPT])
def test_trains_like_plain_pytorch(stage, make):
    batches = token_batches(2, 2, 2) if make is TinyGPT else vector_batches(2, 2, 2)
    reference = train_plainly(make, batches, 1)
    with trilithon.zero.init():
        model = make()
    engine = engine_for(model, stage, accumulation=2)
    losses, norms = train_engine(engine, batches)
    got = dict(engine.full_parameters())
    with trilithon.zero.gathered(model, modify=0), engine.uneven(), engine.no_sync():
        pass
    engine.close()
    assert_same_training(reference, losses, got, tolerance("fp32", 2, optimizer="sgd"), norms)


def test_train_step_finds_the_loss_in_what_a_model_returns():
    class Returns(nn.Module):
        def __init__(self, wrap) -> None:
            super().__init__()
            self.inner, self.wrap = MLP(), wrap

        def forward(self, x, target):
            return self.wrap(self.inner(x, target))

    class Output:
        def __init__(self, loss) -> None:
            self.loss = loss

    batch = vector_batches(1, 2)[0][0]
    expected = MLP()(*batch).item()
    for wrap in (lambda v: v, lambda v: (v, 1), lambda v: {"loss": v}, Output):
        engine = engine_for(Returns(wrap), 0)
        assert engine.train_step([batch]) == pytest.approx(expected)
        assert engine.loss == pytest.approx(expected)
    for wrap in (lambda v: {"other": v}, lambda v: 3, lambda v: None):
        with pytest.raises(ProtocolError, match="without a loss"):
            engine_for(Returns(wrap), 0).train_step([batch])
    named = {"x": batch[0], "target": batch[1]}
    engine = engine_for(MLP(), 0)
    assert engine.train_step([named]) == pytest.approx(expected)
    assert engine.train_step([batch], lambda call, given: call(*given) * 0.0) == 0.0


def test_evaluation_restores_the_mode_and_counts_nothing():
    engine = engine_for(MLP(), 0)
    for training in (True, False):
        engine.train(training)
        assert not engine.eval_step((torch.ones(1, 16),)).requires_grad
        assert engine.module.training is training
    assert (engine.steps, engine.micro_steps, engine.global_samples) == (0, 0, 0)


def test_what_cannot_be_trained_is_refused_before_anything_happens():
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ConfigError, match=r"lazy|no shape yet"):
        trilithon.initialize(lazy, {"optimizer": SGD})
    for wrong in (None, 3, [MLP()]):
        with pytest.raises(ConfigError, match=r"takes a torch\.nn\.Module"):
            trilithon.initialize(wrong, {"optimizer": SGD})
    model = MLP()
    with pytest.raises(ConfigError, match="keep one of the two"):
        trilithon.initialize(model, {"optimizer": SGD}, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="schedule was given, but no optimizer"):
        trilithon.initialize(model, {"lr_schedule": {"kind": "exponential", "gamma": 0.5}})
    with pytest.raises(ConfigError, match="not a parameter of the model"):
        trilithon.initialize(model, {}, torch.optim.SGD(MLP().parameters(), lr=0.1))


def test_counters_and_properties_follow_the_steps():
    engine = engine_for(MLP(), 0, accumulation=2, clip_norm=1e-3)
    assert (engine.rank, engine.world_size, engine.accumulation, engine.lr) == (0, 1, 2, [0.1])
    batches = vector_batches(2, 1, 2)
    train_engine(engine, batches)
    assert (engine.steps, engine.micro_steps, engine.global_samples) == (2, 4, 4)
    assert engine.clip_factor == pytest.approx(1e-3 / (engine.grad_norm + 1e-6)) and engine.loss_scale == 1.0
    assert set(engine.memory()) == {"parameters", "gradients", "master", "optimizer", "in_flight"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_has_one_engine_at_a_time(stage):
    model, config = MLP(), {"optimizer": SGD, "zero": {"stage": stage}}
    first = trilithon.initialize(model, config)
    with pytest.raises(
        ProtocolError, match=r"'layers\.0\.weight' belongs to an engine that was not closed\. Call close"
    ):
        trilithon.initialize(model, config)
    first.close()
    trilithon.initialize(model, config).close()


def test_one_batch_is_not_taken_for_a_list_of_micro_batches():
    with trilithon.initialize(MLP(), {"optimizer": SGD}) as engine:
        for batch in ({"x": torch.ones(2, 16), "target": torch.ones(2, 4)}, torch.ones(2, 16)):
            with pytest.raises(ProtocolError, match=r"write engine.train_step\(\[batch\]\)"):
                engine.train_step(batch)
