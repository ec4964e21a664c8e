"""Saved with experts over ranks, loaded at any degree, stage and number of ranks: the same bits, the same next step."""

import pytest
import torch
import torch.distributed as dist
from moe_models import EPS, EXPERTS, Mixed, batches

import trilithon
from trilithon.checkpoint import open_checkpoint
from trilithon.testing.ranks import ranks, run_ranks

MOE = {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False, "dtype": torch.float32}
FROZEN = "moes.1.experts.down.bias"


def engine_for(ep, stage, precision="fp32"):
    model = Mixed(ep_sizes=(ep, ep), **MOE)
    model.get_parameter(FROZEN).requires_grad_(False)
    config = {"zero": {"stage": stage}, "optimizer": {"kind": "adam", "lr": 1e-2, "eps": EPS}, "precision": precision}
    return trilithon.initialize(model, config)


def whole_state(engine):
    return {kind: {n: v.clone() for n, v in engine.view(kind)} for kind in ("master", "exp_avg", "exp_avg_sq")}


def equal(a, b):
    assert set(a) == set(b)
    return all(torch.equal(a[kind][name], b[kind][name]) for kind in a for name in a[kind])


def step(engine, batch):
    engine.backward(engine(batch.chunk(dist.get_world_size())[dist.get_rank()].to(engine._low or torch.float32)))
    engine.step()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ranks(4, timeout_s=120)
def test_saved_with_two_ranks_for_the_experts_at_stage_2(world_size, precision, tmp_path):
    data = batches(3, 24, torch.float32)
    engine = engine_for(2, 2, precision)
    for batch in data[:2]:
        step(engine, batch)
    engine.save(tmp_path)
    saved = whole_state(engine)
    step(engine, data[2])
    after = whole_state(engine)
    engine.close()
    for ep, stage in ((2, 2), (1, 0), (4, 1), (1, 3), (4, 3), (2, 3), (4, 0)):
        engine = engine_for(ep, stage, precision)
        report = engine.load(tmp_path)
        assert not getattr(report, "problems", [])
        assert equal(saved, whole_state(engine)), (ep, stage)
        step(engine, data[2])
        for kind, tensors in whole_state(engine).items():
            for name, value in tensors.items():
                torch.testing.assert_close(
                    value, after[kind][name], rtol=1e-5, atol=1e-7 if precision == "fp32" else 1e-3
                )
        engine.close()


def save_on(ep, stage, folder):
    engine = engine_for(ep, stage)
    step(engine, batches(1, 24, torch.float32)[0])
    engine.save(folder)
    state = whole_state(engine)
    frozen = dict(engine.view("param", FROZEN))[FROZEN]
    engine.close()
    return state, frozen


def load_on(ep, stage, folder):
    engine = engine_for(ep, stage)
    with torch.no_grad(), trilithon.zero.gathered(list(engine.module.parameters()), modify=0):
        for param in engine.module.parameters():
            param.data.add_(1.0)
    engine.load(folder)
    state, frozen = whole_state(engine), dict(engine.view("param", FROZEN))[FROZEN]
    engine.close()
    return state, frozen


def test_the_number_of_ranks_may_change_and_every_expert_is_stored_once(tmp_path):
    state, frozen = run_ranks(save_on, 4, 4, 3, tmp_path)[0]
    for world_size, ep, stage in ((2, 2, 1), (1, 1, 0)):
        loaded, frozen_too = run_ranks(load_on, world_size, ep, stage, tmp_path)[0]
        assert equal(state, loaded)
        assert torch.equal(frozen, frozen_too)
    reader = open_checkpoint(tmp_path)
    entry = next(e for e in reader.entries("master") if e.name == "moes.0.experts.up.weight")
    assert entry.shape[0] == EXPERTS
    assert torch.equal(reader.read("master", entry.name), state["master"][entry.name])
    one = reader.read("master", entry.name, 2 * 96, 96)
    assert torch.equal(one, state["master"][entry.name][2].flatten())


@pytest.mark.parametrize("stage", [1, 2])
@ranks(2, timeout_s=90)
def test_an_open_window_goes_on_at_the_same_degree_only(world_size, stage, tmp_path):
    data = batches(2, 16, torch.float32)

    def open_engine(ep):
        model = Mixed(ep_sizes=(ep,), **MOE)
        config = {"zero": {"stage": stage}, "optimizer": {"kind": "adam", "lr": 1e-2, "eps": EPS}}
        return trilithon.initialize(model, {**config, "batch": {"micro_size": 8, "accumulation": 2}})

    engine = open_engine(2)
    step(engine, data[0])
    engine.save(tmp_path)
    step(engine, data[1])
    expected = dict(engine.full_parameters())
    engine.close()
    engine = open_engine(2)
    engine.load(tmp_path)
    step(engine, data[1])
    assert all(torch.equal(value, expected[name]) for name, value in engine.full_parameters())
    engine.close()
    engine = open_engine(1)
    with pytest.raises(trilithon.CheckpointError, match="window"):
        engine.load(tmp_path)
    engine.close()
