"""A checkpoint written by a pipeline goes on on any other mesh, and names everything as the whole model does."""

from __future__ import annotations

import pytest
import torch
from pipeline_runs import Alone, batches_of, make, parts_of, settings
from torch import nn

import trilithon
from trilithon import PipelineModule
from trilithon.checkpoint import open_checkpoint
from trilithon.testing import ranks, run_ranks

MICROS, ROWS, STEPS = 4, 4, 4


def run(folder, mesh, stage, loads, schedule="1f1b"):
    """Two of the four steps: the first two and a save, or the last two after a load. Losses, and the state after."""
    config = settings(MICROS, ROWS, mesh=mesh, zero={"stage": stage}, pipeline={"schedule": schedule})
    steps = batches_of(STEPS, MICROS, ROWS)
    with trilithon.initialize(make(), config) as engine:
        torch.manual_seed(5)
        if loads:
            report = engine.load(folder, parts=("weights", "optimizer", "schedule", "counters"))
            assert engine.steps == 2 and not report.ignored.get("weights")
            torch.manual_seed(5)
            for _ in range(2):  # the draws of two steps
                torch.randint(2**62, ())
        losses = [engine.train_step(parts_of(engine, b)) for b in (steps[2:] if loads else steps[:2])]
        if not loads:
            engine.save(folder)
        kinds = ("master", "exp_avg", "exp_avg_sq")
        return losses, {f"{kind} {name}": value for kind in kinds for name, value in engine.view(kind)}


MESHES = [
    (({"pipe": 2}, 1, False), ({}, 0, True)),
    (({}, 0, False), ({"pipe": 2}, 2, True)),
    (({"pipe": 2, "data": 2}, 2, False), ({"pipe": 3}, 1, True, "zero-bubble")),
    (({"pipe": 2}, 0, False, "interleaved"), ({"pipe": 2, "data": 2}, 1, True)),
]


@pytest.mark.parametrize(("written", "read"), MESHES)
def test_a_run_goes_on_on_another_mesh(written, read, tmp_path):
    reference = Alone(batches_of(STEPS, MICROS, ROWS))
    world = [torch.Size(mesh.values()).numel() if mesh else 1 for mesh, *_ in (written, read)]
    losses, before = run_ranks(run, world[0], tmp_path, *written)[0]
    stored = open_checkpoint(tmp_path)
    names = [name.removeprefix("master ") for name in before if name.startswith("master ")]
    assert sorted(names) == sorted(dict(make().named_parameters()))
    for name in names:
        assert torch.equal(stored.read("master", name), before[f"master {name}"])
    for later, after in run_ranks(run, world[1], tmp_path, *read):
        torch.testing.assert_close(torch.tensor(losses + later), torch.tensor(reference.losses), rtol=1e-5, atol=1e-6)
        for name, value in reference.parameters.items():
            torch.testing.assert_close(after[f"master {name}"], value, rtol=1e-5, atol=1e-5, msg=name)


class Counting(nn.Module):
    """A layer with a buffer that moves and one parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += x.shape[0]
        return x * self.scale


@ranks(2)
def test_the_same_mesh_goes_on_bit_for_bit_with_buffers_and_random_states(world_size, tmp_path):
    x = torch.linspace(-1, 1, 12).view(2, 6)

    def engine_of():
        torch.manual_seed(1)
        layers = [Counting(), nn.Linear(6, 6), nn.Dropout(0.5), Counting(), nn.Linear(6, 6), nn.Dropout(0.5)]
        model = PipelineModule(layers, loss_fn=nn.functional.mse_loss)
        config = {"mesh": {"pipe": 2}, "batch": {"micro_size": 2, "accumulation": 2}, "optimizer": "adamw"}
        return trilithon.initialize(model, config)

    with engine_of() as engine:
        engine.train_step([(x, x)] * 2)
        engine.save(tmp_path)
        expected = [engine.train_step([(x, x)] * 2) for _ in range(2)]
        wanted = engine.state_dict()
    assert {"0.seen", "3.seen"} <= set(wanted) and wanted["3.seen"] == 12.0
    with engine_of() as engine:
        engine.load(tmp_path)
        assert [engine.train_step([(x, x)] * 2) for _ in range(2)] == expected
        found = engine.state_dict()
        assert list(found) == list(wanted)
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())
