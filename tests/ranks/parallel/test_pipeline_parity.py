"""Every mesh with stages trains as one process does: losses, norms and weights, dropout, clipping and ties included."""

from __future__ import annotations

import pytest
import torch
from pipeline_runs import Alone, batches_of, make, settings, train

from trilithon.engine.build import initialize
from trilithon.models import GPT, GPTConfig
from trilithon.testing import ranks, run_ranks
from trilithon.testing.parity import rank_part

MICROS, ROWS = 4, 4


def assert_alike(found, reference):
    losses, norms, parameters = found
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference.losses), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(reference.norms), rtol=1e-4, atol=1e-6)
    assert sorted(parameters) == sorted(reference.parameters)
    for name, value in parameters.items():
        torch.testing.assert_close(value, reference.parameters[name], rtol=1e-5, atol=1e-5, msg=name)


@ranks(1, 2, 4)
def test_stages_train_like_one_process(world_size):
    steps = batches_of(5, MICROS, ROWS)
    reference = Alone(steps, clip_norm=0.5)
    for stage in (0, 1, 2):
        more = {"mesh": {"pipe": world_size}, "zero": {"stage": stage}, "clip_norm": 0.5}
        assert_alike(train(settings(MICROS, ROWS, **more), steps), reference)


@ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_beside_data_parallel_ranks_train_like_one_process(world_size, stage):
    steps = batches_of(5, MICROS, ROWS)
    reference = Alone(steps, clip_norm=0.5)
    more = {"mesh": {"pipe": 2}, "zero": {"stage": stage}, "clip_norm": 0.5}
    assert_alike(train(settings(MICROS, ROWS, **more), steps), reference)


@ranks(2)
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero-bubble"])
def test_every_schedule_trains_like_one_process(world_size, schedule):
    steps = batches_of(5, MICROS, ROWS)
    more = {"mesh": {"pipe": 2}, "zero": {"stage": 1}, "clip_norm": 0.5, "pipeline": {"schedule": schedule}}
    assert_alike(train(settings(MICROS, ROWS, **more), steps), Alone(steps, clip_norm=0.5))


@ranks(4)
@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_every_schedule_goes_with_data_parallel_ranks(world_size, schedule):
    steps = batches_of(3, MICROS, ROWS)
    more = {"mesh": {"pipe": 2}, "zero": {"stage": 2}, "clip_norm": 0.5, "pipeline": {"schedule": schedule}}
    assert_alike(train(settings(MICROS, ROWS, **more), steps), Alone(steps, clip_norm=0.5))


@ranks(2)
def test_a_model_that_builds_its_own_stage_only_trains_alike(world_size):
    steps = batches_of(3, MICROS, ROWS)

    def build():
        model = make(num_stages=2)
        names = {name.partition(".")[0] for name, _ in model.named_parameters()}
        assert names < {"0", "3", "4", "5", "7"} and "0" in names  # a part of the layers, and the tied one
        return model

    assert_alike(train(settings(MICROS, ROWS), steps, build), Alone(steps))
    whole = make()
    own = make(num_stages=2)
    for name, value in own.named_parameters():
        assert torch.equal(value, whole.get_parameter(name)), name


@ranks(2)
def test_layers_that_are_computed_again_give_the_same_bits(world_size):
    steps = batches_of(2, MICROS, ROWS)
    plain = train(settings(MICROS, ROWS, mesh={"pipe": 2}), steps)
    for interval in (1, 2, 3):
        again = train(settings(MICROS, ROWS, mesh={"pipe": 2}, pipeline={"recompute_interval": interval}), steps)
        assert again[:2] == plain[:2]
        assert all(torch.equal(value, plain[2][name]) for name, value in again[2].items())


GPT_STEPS = 3


def gpt_losses(mesh, stage=0, schedule="1f1b", **more):
    """Losses and weights of the GPT on a mesh; alone it is the ordinary model and engine."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=24, width=16, num_layers=3, num_heads=2, context=8, tie_embeddings=True))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(24, (GPT_STEPS, 4, 2, 9), generator=generator)
    config = {
        "mesh": mesh, "zero": {"stage": stage}, "batch": {"global_size": 8, "accumulation": 4}, "clip_norm": 0.3,
        "optimizer": {"kind": "adamw", "lr": 3e-3}, "pipeline": {"schedule": schedule}, **more,
    }  # fmt: skip
    with initialize(model, config) as engine:
        losses = []
        for step in tokens:
            parts = [rank_part((x[:, :-1], x[:, 1:]), engine.mesh.data_rank, engine.mesh.data_size) for x in step]
            losses.append(engine.train_step(parts))
        return losses, dict(engine.full_parameters()), sorted(engine.state_dict())


GPT_MESHES = [
    (2, {"pipe": 2}, 1, "1f1b"),
    (2, {"pipe": 2}, 2, "zero-bubble"),
    (4, {"pipe": 2, "tensor": 2}, 1, "1f1b"),
    (4, {"pipe": 2, "tensor": 2}, 2, "interleaved"),
    (4, {"pipe": 2, "sequence": 2}, 0, "gpipe"),
    (4, {"pipe": 2, "data": 2}, 2, "1f1b"),
]


@pytest.mark.parametrize(("world", "mesh", "stage", "schedule"), GPT_MESHES)
def test_the_gpt_model_is_cut_as_it_is_and_keeps_its_names(world, mesh, stage, schedule):
    losses, weights, names = gpt_losses({})
    for found, theirs, their_names in run_ranks(gpt_losses, world, mesh, stage, schedule):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        assert their_names == names and sorted(theirs) == sorted(weights)
        for name, value in theirs.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-5, msg=name)
