"""A checkpoint written on one mesh goes on, bit for bit in its state, on another."""

from __future__ import annotations

import pytest
import torch
from mesh_runs import CLIP, OPTIMIZERS, batches, make, plain

from trilithon.checkpoint import open_checkpoint
from trilithon.engine.build import initialize
from trilithon.testing import run_ranks

ACCUMULATION = 1


def config(mesh, stage, cut_norms=False):
    tensor = {"tensor": {"cut_norms": True}} if cut_norms else {}
    sizes = {"batch": {"global_size": 4}}
    return {
        "mesh": mesh,
        "zero": {"stage": stage},
        "optimizer": OPTIMIZERS["gpt"],
        "clip_norm": CLIP,
        **tensor,
        **sizes,
    }


def part(batch, engine):
    rows = 4 // engine.mesh.data_size
    return tuple(x[engine.mesh.data_rank * rows :][:rows] for x in batch)


def state_of(engine):
    kinds = ("master", "exp_avg", "exp_avg_sq")
    return {f"{kind} {name}": value.clone() for kind in kinds for name, value in engine.view(kind)}


def save(folder, mesh, stage, cut_norms):
    """Two steps, then a checkpoint."""
    with initialize(make("gpt"), config(mesh, stage, cut_norms)) as engine:
        for batch in batches("gpt", 1)[:2]:
            engine.train_step([part(batch[0], engine)])
        engine.save(folder)
        return state_of(engine)


def go_on(folder, mesh, stage, cut_norms):
    """Load, and the remaining steps. The generators are where one process has them: dropout goes on as it would."""
    with initialize(make("gpt"), config(mesh, stage, cut_norms)) as engine:
        engine.load(folder, parts=("weights", "optimizer", "counters"))
        loaded = state_of(engine)
        state = torch.get_rng_state()
        torch.set_rng_state(state)
        draws_of_a_step = 1 + 3 * 2  # embedding; attention weights and two residual terms in each of two blocks
        for _ in range(2 * draws_of_a_step):
            torch.randint(2**62, ())
        losses = [engine.train_step([part(batch[0], engine)]) for batch in batches("gpt", 1)[2:]]
        return loaded, losses


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (({"tensor": 2}, 0, False), ({"data": 2}, 2, False)),
        (({"data": 2}, 3, False), ({"tensor": 2}, 1, True)),
        (({"tensor": 2}, 3, True), ({"sequence": 2}, 0, False)),
        (({"data": 2, "tensor": 2}, 2, True), ({"tensor": 4}, 3, False)),
        (({"sequence": 2, "tensor": 2}, 1, False), ({}, 0, False)),
    ],
)
def test_a_run_goes_on_on_another_mesh(written, read, tmp_path):
    world = [torch.Size(mesh.values()).numel() if mesh else 1 for mesh, *_ in (written, read)]
    before = run_ranks(save, world[0], tmp_path, *written)[0]
    stored = open_checkpoint(tmp_path)
    for name in ("embedding.weight", "blocks.0.attention.qkv.weight", "blocks.1.mlp.down.weight"):
        assert torch.equal(stored.read("master", name), before[f"master {name}"])
    expected = plain("gpt", ACCUMULATION).losses[2:]
    for loaded, losses in run_ranks(go_on, world[1], tmp_path, *read):
        assert loaded.keys() == before.keys()
        assert all(torch.equal(loaded[name], value) for name, value in before.items())
        assert losses == pytest.approx(expected, rel=1e-5)


def in_the_middle(folder, mesh, stage):
    """One of two micro-batches, saved, and the step that follows it; with and without the way over the disk."""
    settings = {**config(mesh, stage), "batch": {"micro_size": 4, "accumulation": 2}}
    first, second = (batch[0] for batch in batches("gpt", 1)[:2])
    norms = []
    for loads in (False, True):
        with initialize(make("gpt").eval(), settings) as engine:
            if loads:
                engine.load(folder)
            else:
                engine.backward(engine(*first))
                engine.save(folder)
            engine.backward(engine(*second))
            assert engine.step()
            norms.append((engine.grad_norm, engine.loss))
    return norms


@pytest.mark.parametrize("stage", [0, 2])
def test_an_open_window_goes_on_on_the_same_mesh(stage, tmp_path):
    for straight, resumed in run_ranks(in_the_middle, 2, tmp_path, {"tensor": 2}, stage):
        assert straight == resumed
