"""What goes wrong on one stage ends the step on all of them, by name and without waiting."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from pipeline_runs import batches_of, make, parts_of, settings
from torch import nn

import trilithon
from trilithon import PipelineModule
from trilithon.errors import ConfigError, NonFiniteError, ProtocolError
from trilithon.testing import ranks

MICROS, ROWS = 4, 4


def step_of(engine):
    return parts_of(engine, batches_of(1, MICROS, ROWS)[0])


class Trap(nn.Module):
    """Passes on what it gets, until it is told to raise."""

    armed = ""

    def forward(self, x):
        if self.armed == "forward":
            raise ValueError("a layer raised")
        if self.armed == "backward" and x.requires_grad:
            x.register_hook(self.spring)
        return x

    def spring(self, grad):
        raise ValueError("a layer raised")


def trapped(at: int, stages: int) -> tuple[PipelineModule, Trap]:
    torch.manual_seed(0)
    trap = Trap()
    layers = [nn.Linear(6, 6) for _ in range(stages)]
    for index in range(stages):
        layers[index] = nn.Sequential(trap if index == at else nn.Identity(), layers[index])
    return PipelineModule(layers, loss_fn=nn.functional.mse_loss, partition_method="uniform"), trap


@ranks(3)
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("late", [False, True])
def test_an_exception_on_any_stage_reaches_all_and_nothing_was_applied(world_size, way, late):
    x = torch.linspace(-1, 1, 12).view(2, 6)
    for at in range(3):
        model, trap = trapped(at, 3)
        config = {"mesh": {"pipe": 3}, "batch": {"micro_size": 2, "accumulation": 4}, "optimizer": "adamw"}
        with trilithon.initialize(model, config) as engine:
            if late:  # the stages know each other's shapes already
                engine.train_step([(x, x)] * 4)
            before, begun = engine.state_dict(), time.monotonic()
            trap.armed = way
            kind = ValueError if engine.rank == at else ProtocolError
            with pytest.raises(kind, match="a layer raised") as caught:
                engine.train_step([(x.clone().requires_grad_() if at == 0 else x, x)] * 4)
            assert engine.rank == at or f"rank {at} (stage {at}): ValueError" in str(caught.value)
            assert time.monotonic() - begun < 5.0
            assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
            trap.armed = ""
            loss = engine.train_step([(x, x)] * 4)  # the engine is whole
            assert loss > 0 and engine.steps == 1 + late
            if way == "forward":
                trap.armed = way
                with pytest.raises((ValueError, ProtocolError), match="a layer raised"):
                    engine.eval_step([(x, x)] * 2)
                trap.armed = ""
                assert engine.eval_step([(x, x)] * 2) > 0


@ranks(2)
def test_data_that_one_stage_does_not_have_are_told_to_all(world_size):
    with trilithon.initialize(make(), settings(MICROS, ROWS, mesh={"pipe": 2})) as engine:
        here = step_of(engine)
        with pytest.raises(ProtocolError, match=r"rank 1: it got 3 micro-batches, and this step has 4"):
            engine.train_step(here[:3] if engine.rank == 1 else here)
        with pytest.raises(ProtocolError, match=r"rank 0: a micro-batch of a pipeline is a pair .* got a Tensor"):
            engine.train_step([here[0][0]] * 4 if engine.rank == 0 else here)
        with pytest.raises(ProtocolError, match="rank 0: it got one dict"):
            engine.train_step({} if engine.rank == 0 else here)
        with pytest.raises(ProtocolError, match="got 1 micro-batches on one rank and 2 on another"):
            engine.eval_step(here[: 1 + engine.rank])
        engine.train_step(here)


@ranks(2)
def test_shapes_that_depend_on_values_are_refused_unless_they_are_announced(world_size):
    def positive(x):
        return x[x[:, 0] > 0]

    x = torch.linspace(-1, 1, 12).view(4, 3)
    for dynamic in (False, True):
        layers = [nn.Linear(3, 3), positive, nn.Linear(3, 1)]
        with torch.no_grad():
            layers[0].weight.copy_(torch.eye(3))
            layers[0].bias.zero_()
        model = PipelineModule(layers, loss_fn=lambda y, _: y.sum(), partition_method=[1, 0, 1], dynamic_shape=dynamic)
        config = {"mesh": {"pipe": 2}, "batch": {"micro_size": 4}, "optimizer": {"kind": "sgd", "lr": 0.0}}
        with trilithon.initialize(model, config) as engine:
            engine.train_step([(x, x)])
            if dynamic:
                engine.train_step([(x + 1, x)])
                continue
            with pytest.raises(ProtocolError, match="dynamic_shape=True"):
                engine.train_step([(x + 1, x)])


@ranks(2)
def test_an_overflow_on_one_stage_skips_the_step_on_all(world_size):
    def batches(engine, scale):
        x = torch.ones(2, 6) * scale
        return [(x, x)] * 2

    torch.manual_seed(0)
    model = PipelineModule([nn.Linear(6, 6), nn.Linear(6, 6)], loss_fn=nn.functional.mse_loss)
    precision = {"kind": "fp16", "initial_scale_power": 4, "hysteresis": 1}
    config = {
        "mesh": {"pipe": 2}, "batch": {"micro_size": 2, "accumulation": 2}, "optimizer": "adamw", "precision": precision
    }  # fmt: skip
    with trilithon.initialize(model, config) as engine:
        engine.train_step(batches(engine, 1.0))
        before = engine.state_dict()
        engine.train_step(batches(engine, 6e4))
        assert (engine.steps, engine.skipped_steps) == (1, 1) and engine.non_finite > 0 and engine.loss_scale == 8.0
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    config = {**config, "precision": {"kind": "fp32", "non_finite": "raise"}}
    torch.manual_seed(0)
    model = PipelineModule([nn.Linear(6, 6), nn.Linear(6, 6)], loss_fn=nn.functional.mse_loss)
    with trilithon.initialize(model, config) as engine:
        with pytest.raises(NonFiniteError, match="gradient elements"):
            engine.train_step(batches(engine, float("inf")))


@ranks(2)
def test_calls_that_run_one_stage_only_are_refused(world_size):
    with trilithon.initialize(make(), settings(MICROS, ROWS, mesh={"pipe": 2})) as engine:
        batch = step_of(engine)[0]
        calls = [
            lambda: engine(batch[0]), lambda: engine.backward(torch.ones(())), engine.step,
            lambda: engine.no_sync().__enter__(), lambda: engine.uneven().__enter__(),
            lambda: engine.train_step([batch] * 4, lambda e, b: e(b)), lambda: list(engine.view("grad")),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(ProtocolError, match="runs one stage only, and this model has 2"):
                call()
        with pytest.raises(ProtocolError, match="on another stage of the pipeline"):
            engine.module(batch[0])


REFUSED = [
    ({"zero": {"stage": 3}}, "Use zero.stage 0, 1 or 2 inside the stages"),
    ({"optimizer": "onebit_adam"}, "mesh.pipe=2"),
    ({"recompute": {}}, "Use pipeline.recompute_interval"),
    ({"pipeline": {"schedule": "interleaved"}, "batch": {"accumulation": 3}}, "Use 2 or 4"),
    ({"pipeline": {"chunks": 2}}, "needs pipeline.schedule='interleaved'"),
    ({"pipeline": {"schedule": "interleaved", "chunks": 9}, "batch": {"accumulation": 2}}, "do not make 18 stages"),
    ({"pipeline": {"partition": "best"}}, "there are 'parameters', 'uniform'"),
]


@ranks(2)
def test_what_does_not_go_with_stages_is_refused_by_name(world_size):
    for more, text in REFUSED:
        with pytest.raises(ConfigError, match=text):
            trilithon.initialize(make(), {"mesh": {"pipe": 2}, "optimizer": "adamw", **more})
    with pytest.raises(ConfigError, match="does not say how it is a list of layers"):
        trilithon.initialize(nn.Bilinear(2, 2, 2), {"mesh": {"pipe": 2}, "optimizer": "adamw"})
    with pytest.raises(ConfigError, match=r"made for 2 stages and mesh.pipe is 4"):
        trilithon.initialize(make(num_stages=2), {"mesh": {"pipe": 4}, "optimizer": "adamw"})
    with pytest.raises(ConfigError, match="num_stages=3 does not divide 2 ranks"):
        make(num_stages=3)
    dist.barrier()


@ranks(2)
def test_one_stage_at_zero_3_is_refused_when_the_engine_is_made(world_size):
    """Its layers are called one by one, and not through the model whose call gathers what they need."""
    model = PipelineModule([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)], loss_fn=nn.functional.mse_loss)
    with pytest.raises(ConfigError, match=r"PipelineModule .* zero.stage=3 .* zero.stage 0, 1 or 2"):
        trilithon.initialize(model, {"zero": {"stage": 3}, "optimizer": {"kind": "adamw", "lr": 1e-3}})
