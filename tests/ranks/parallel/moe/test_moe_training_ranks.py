"""Experts over ranks, at every stage, train like one process that routes each rank's part of the batch by itself."""

import itertools

import pytest
import torch
from moe_models import EPS, EXPERTS, Mixed, PlainMixed, batches, train_reference

import trilithon
from trilithon.testing.ranks import ranks

STEPS, ROWS, CLIP = 5, 24, 0.05
ROUTING = {
    "top-1 capacity": {"k": 1, "capacity_factor": 0.75, "min_capacity": 1, "drop_policy": "position"},
    "top-1 dropless": {"k": 1, "drop_tokens": False},
    "top-2 capacity": {"k": 2, "capacity_factor": 0.75, "min_capacity": 1, "drop_policy": "probs"},
    "top-2 dropless": {"k": 2, "drop_tokens": False},
}


def plain_options(moe):
    factor = moe.get("capacity_factor") if moe.get("drop_tokens", True) else None
    return {
        "capacity_factor": factor,
        "min_capacity": moe.get("min_capacity", 4),
        "policy": moe.get("drop_policy", "position"),
    }


def run(model, data, world_size, rank, stage, **config):
    engine = trilithon.initialize(
        model,
        {"zero": {"stage": stage}, "optimizer": {"kind": "adam", "lr": 1e-2, "eps": EPS}, "clip_norm": CLIP, **config},
    )
    losses, norms = [], []
    for step, batch in enumerate(data):
        engine.backward(engine(batch.chunk(world_size)[rank]))
        if step == len(data) - 1:
            gradients = dict(engine.view("grad"))
        engine.step()
        losses.append(engine.loss)
        norms.append(engine.grad_norm)
    found = {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "parameters": dict(engine.view("master")),
        "exp_avg": dict(engine.view("exp_avg")),
    }
    return engine, found


def worst(expected, found):
    assert set(expected) == set(found), set(expected) ^ set(found)
    return max(float((expected[name].double() - found[name].double()).abs().max()) for name in expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(4, timeout_s=120)
def test_training_equals_the_one_process_loop(world_size, stage):
    import torch.distributed as dist

    rank, data = dist.get_rank(), batches(STEPS, ROWS)
    for routing, ep in itertools.product(ROUTING, (1, 2, 4)):
        moe = {**ROUTING[routing], "top2_2nd_expert_sampling": False}
        if ep == 1:
            plain = PlainMixed(Mixed(**moe), **plain_options(moe))
            expected = train_reference(plain, data, world_size, lr=1e-2, clip=CLIP)
        engine, found = run(Mixed(ep_sizes=(ep,), **moe), data, world_size, rank, stage)
        for step in range(STEPS):
            assert abs(found["losses"][step] - expected["losses"][step]) < 1e-12, (routing, ep, step)
            assert found["norms"][step] == pytest.approx(expected["norms"][step], rel=2.0**-23), (routing, ep, step)
        for kind in ("gradients", "parameters", "exp_avg"):
            assert worst(expected[kind], found[kind]) < 1e-12, (routing, ep, kind)
        engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@ranks(4, timeout_s=120)
def test_training_in_fp32_equals_it_to_rounding(world_size, stage):
    import torch.distributed as dist

    rank, data = dist.get_rank(), batches(STEPS, ROWS, torch.float32)
    for routing, ep in itertools.product(("top-1 capacity", "top-2 dropless"), (2, 4)):
        moe = {**ROUTING[routing], "top2_2nd_expert_sampling": False, "dtype": torch.float32}
        expected = train_reference(PlainMixed(Mixed(**moe), **plain_options(moe)), data, world_size, lr=1e-3, clip=CLIP)
        config = {"optimizer": {"kind": "adam", "lr": 1e-3, "eps": EPS}}
        engine, found = run(Mixed(ep_sizes=(ep,), **moe), data, world_size, rank, stage, **config)
        assert max(abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=True)) < 1e-5
        assert worst(expected["gradients"], found["gradients"]) < 1e-5, (routing, ep)
        assert worst(expected["parameters"], found["parameters"]) < 1e-5, (routing, ep)
        engine.close()


@pytest.mark.parametrize("stage", [1, 3])
@ranks(4, timeout_s=120)
def test_layers_with_different_degrees_in_either_order(world_size, stage):
    """Every layer has its own groups; one norm and one clip factor span them all."""
    import torch.distributed as dist

    rank, data = dist.get_rank(), batches(STEPS, ROWS)
    moe = {**ROUTING["top-2 capacity"], "top2_2nd_expert_sampling": False}
    expected = train_reference(
        PlainMixed(Mixed(ep_sizes=(1, 1, 1), **moe), **plain_options(moe)), data, world_size, lr=1e-2, clip=CLIP
    )
    for order in (False, True):
        model = Mixed(ep_sizes=(2, None, 1), **moe)
        engine, found = run(model, data, world_size, rank, stage, moe={"data_before_experts": order})
        held = [layer.experts.first for layer in model.moes]
        place = rank // 2 if order else rank % 2
        assert held == [place * 2, rank, 0]
        for kind in ("gradients", "parameters", "exp_avg"):
            assert worst(expected[kind], found[kind]) < 1e-12, kind
        assert found["norms"] == pytest.approx(expected["norms"], rel=2.0**-23)
        engine.close()
        whole = dict(model.named_parameters())
        assert worst(expected["parameters"], {name: whole[name].detach() for name in expected["parameters"]}) < 1e-12
        assert all(layer.experts.here == EXPERTS for layer in model.moes)
