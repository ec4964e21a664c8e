"""The bytes that a dry run tells for a mesh are those that its ranks hold."""

from __future__ import annotations

import pytest
import torch

import trilithon
from trilithon.models import GPT
from trilithon.pretrain import load_pretrain
from trilithon.pretrain.preview import mesh_bytes
from trilithon.testing import run_ranks


def told_and_held(changes):
    settings = load_pretrain(
        overrides={"data.paths": ["x"], "model.preset": "nano", "run.steps": 10, "batch.micro_size": 2, **changes}
    )
    shape = settings.model.shape(257)
    told = mesh_bytes(settings, shape, torch.distributed.get_world_size())
    engine_settings = {**settings.engine.model_dump(), "monitor": {}}
    with trilithon.initialize(GPT(shape), engine_settings) as engine:
        tokens = torch.zeros(2, 8, dtype=torch.long)
        if engine.mesh.axes.size("pipe") > 1:
            engine.train_step([(tokens, tokens)] * 2)
            return told, engine.memory()
        engine.backward(engine(tokens, tokens))
        held = engine.memory()
        engine.step()
        held["optimizer"] = engine.memory()["optimizer"]
    return told, held


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.tensor": 2, "zero.stage": 0},
        {"mesh.tensor": 2, "zero.stage": 3, "precision": "bf16", "tensor.cut_norms": True},
        {"mesh.sequence": 2, "zero.stage": 2},
        {"model.experts": 4, "zero.stage": 1, "model.ep_size": 2},
    ],
    ids=str,
)
def test_the_bytes_of_a_mesh_are_those_of_a_run(changes):
    for told, held in run_ranks(told_and_held, 2, changes):
        for name, size in told.items():
            assert held.get(name, 0) == pytest.approx(size, rel=0.02), name  # up to the padding of units


def test_the_bytes_of_the_larger_stage_are_those_of_a_run():
    changes = {"mesh.pipe": 2, "zero.stage": 1, "batch.accumulation": 2, "model.num_layers": 3}
    found = run_ranks(told_and_held, 2, changes)
    told = found[0][0]
    for name in ("parameters", "optimizer"):
        most = max(held[name] for _, held in found)
        assert most == pytest.approx(told[name], rel=0.02), name
