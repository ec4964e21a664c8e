"""Experts in the stages of a pipeline, whole or over the ranks of a stage, train as in one process."""

from __future__ import annotations

import pytest
import torch
from sparse_runs import EXPERTS, ROWS, Alone, loss_fn, make, train

import trilithon
from trilithon import LayerSpec, PipelineModule
from trilithon.engine.build import initialize
from trilithon.models import GPT, preset
from trilithon.parallel.moe import FeedForward, MoE
from trilithon.testing import ranks, run_ranks

MICROS = 2
GREEDY = {"top2_2nd_expert_sampling": False, "drop_policy": "position"}
DROPLESS = {"drop_tokens": False, **GREEDY}
CROWDED = {"capacity_factor": 0.75, "min_capacity": 1, **GREEDY}
PIPES = {"pipe": 2, "data": 2}


def same(found, expected, rtol=1e-5, atol=1e-6):
    """Three steps of Adam in fp32 from gradients that differ in their last bits. atol: for values near 0."""
    losses, norms, parameters = found
    assert losses == pytest.approx(expected[0], rel=rtol) and norms == pytest.approx(expected[1], rel=rtol)
    assert set(parameters) == set(expected[2])
    for name, value in expected[2].items():
        torch.testing.assert_close(
            parameters[name], value, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n} {text}"
        )


def train_at(stages, **options):
    return [train(PIPES, stage, **options) for stage in stages]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("moe", [DROPLESS, CROWDED])
def test_two_stages_with_experts_over_two_ranks_each_equal_one_process(k, moe):
    """Top-1 and top-2, with and without dropping, ZeRO 0 to 2, clipped: the loop over parts in plain code."""
    alone = Alone(make(k=k, **moe), moe.get("capacity_factor"), [ROWS // 2] * 2)
    for found in run_ranks(train_at, 4, (0, 1, 2), k=k, **moe):
        for one in found:
            same(one, (alone.losses, alone.norms, alone.parameters))


def test_ranks_with_different_numbers_of_tokens_and_with_none():
    """A data rank with 9 rows and one with 3; what travels between stages differs from rank to rank."""
    for moe in (DROPLESS, CROWDED):
        alone = Alone(make(k=2, **moe), moe.get("capacity_factor"), [9, 3])
        for found in run_ranks(train, 4, PIPES, 2, sizes=[9, 3], k=2, **moe):
            same(found, (alone.losses, alone.norms, alone.parameters))
    with_none = run_ranks(train, 2, {"data": 2}, 2, sizes=[12, 0], k=2, **DROPLESS)[0]
    for found in run_ranks(train, 4, PIPES, 2, sizes=[12, 0], k=2, **DROPLESS):
        same(found, with_none)


def train_with(schedules, **options):
    return [train(PIPES, 1, more={"pipeline": pipeline}, **options) for pipeline in schedules]


SCHEDULES = [
    {}, {"schedule": "gpipe"}, {"schedule": "interleaved"}, {"schedule": "zero-bubble"}, {"recompute_interval": 1},
    {"schedule": "zero-bubble", "recompute_interval": 2},
]  # fmt: skip


@pytest.mark.parametrize("moe", [DROPLESS, {"capacity_factor": 0.5, "min_capacity": 1, "noisy_gate_policy": "RSample"}])
def test_every_schedule_and_recomputation_train_alike(moe):
    """With a dense branch beside the experts, whose matrices zero-bubble splits, and by lot, which is drawn once."""
    plain, *others = run_ranks(train_with, 4, SCHEDULES, use_residual=True, **moe)[0]
    for found in others:
        same(found, plain, rtol=1e-6)


STAGES_APART = [
    {"ep_sizes": (1, 2)}, {"ep_sizes": (2, 1)}, {"ep_sizes": (2, None), "dense_first": True},
    {"ep_sizes": (1, 1), "dense_first": True, "aux_loss_scope": "global"},
]  # fmt: skip


def train_each(mesh, options):
    return [train(mesh, 2, k=2, **DROPLESS, **one) for one in options]


def test_stages_with_different_degrees_and_stages_without_experts():
    whole = run_ranks(train_each, 2, {"data": 2}, STAGES_APART)[0]
    for found in run_ranks(train_each, 4, PIPES, STAGES_APART):
        for one, expected in zip(found, whole, strict=True):
            same(one, expected)


def test_in_the_other_order_of_ranks_and_in_two_steps_between_nodes():
    """Eight ranks: stages of four, whose expert groups are on nodes of two."""
    plain = run_ranks(train, 4, {"data": 4}, 1, (4, 2), k=2, **DROPLESS)[0]
    for moe in ({"data_before_experts": True}, {"all_to_all": "hierarchical", "node_size": 2}):
        found = run_ranks(train, 8, {"pipe": 2, "data": 4}, 1, (4, 2), more={"moe": moe}, k=2, **DROPLESS)[0]
        same(found, plain)


LAMB = {"optimizer": {"kind": "lamb", "lr": 1e-2, "weight_decay": 0.1}}


@pytest.mark.parametrize("more", [LAMB, {"offload": {"state": "host"}}])
def test_update_rules_see_the_experts_of_all_stages(more):
    """LAMB has one norm for each expert, also on a stage that has none; state in host memory moves with its stage."""
    alone = train({}, 1, (1, 1), dense_first=True, more=more, k=2, **DROPLESS)
    whole = run_ranks(train, 2, {"data": 2}, 1, dense_first=True, more=more, k=2, **DROPLESS)[0]
    same(run_ranks(train, 2, {"pipe": 2}, 1, (1, 1), dense_first=True, more=more, k=2, **DROPLESS)[1], alone)
    for found in run_ranks(train, 4, PIPES, 1, dense_first=True, more=more, k=2, **DROPLESS):
        same(found, whole)


@ranks(4)
def test_stages_that_build_their_own_layers_begin_with_the_values_of_one_process(world_size):
    def layers():
        torch.manual_seed(3)
        specs = [LayerSpec(MoE, 8, FeedForward(8, 12), EXPERTS, 2) for _ in range(2)]
        return [specs[0], lambda out: out[0], specs[1], lambda out: out[0]]

    whole = PipelineModule(layers(), loss_fn=loss_fn)
    model = PipelineModule(layers(), num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    with trilithon.initialize(model, {"optimizer": "adamw"}) as engine:
        found = dict(engine.full_parameters())
    expected = dict(whole.named_parameters())
    assert set(found) == set(expected) and all(torch.equal(found[name], value) for name, value in expected.items())


# ------------------------------------------------------------------------------------------------ a GPT on whole meshes
def gpt(ep_size=1):
    torch.manual_seed(0)
    return GPT(
        preset(
            "nano", vocab_size=48, context=16, width=16, num_layers=4, experts=4, top_k=2, ep_size=ep_size,
            capacity_factor=None, balance_coeff=0.05,
        )
    )  # fmt: skip


def train_gpt(mesh, ep_size=1):
    settings = {"mesh": mesh, "zero": {"stage": 1}, "batch": {"micro_size": 2, "accumulation": MICROS}}
    with initialize(gpt(ep_size), {**settings, "optimizer": {"kind": "adam", "lr": 1e-2, "eps": 1e-6}}) as engine:
        generator, losses = torch.Generator().manual_seed(1), []
        for _ in range(3):
            tokens = torch.randint(48, (MICROS, 2, 17), generator=generator)
            losses.append(float(engine.train_step([(one[:, :-1], one[:, 1:]) for one in tokens])))
        return losses, {name: value.clone() for name, value in engine.full_parameters()}


def test_two_stages_with_experts_equal_one_process():
    """The balance loss of each stage's experts joins its own backward."""
    alone = train_gpt({})
    for losses, parameters in run_ranks(train_gpt, 2, {"pipe": 2}):
        assert losses == pytest.approx(alone[0], rel=1e-5)
        for name, value in parameters.items():
            torch.testing.assert_close(value, alone[1][name], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("axis", "ep_size"), [("tensor", 1), ("tensor", 2), ("sequence", 2)])
def test_stages_of_tensor_or_sequence_ranks_that_share_out_experts(axis, ep_size):
    """A stage of two ranks does what the mesh does without stages. Both see the same samples."""
    whole = run_ranks(train_gpt, 2, {axis: 2}, ep_size)[0]
    for losses, parameters in run_ranks(train_gpt, 4, {"pipe": 2, axis: 2}, ep_size):
        assert losses == pytest.approx(whole[0], rel=1e-5)
        for name, value in parameters.items():
            torch.testing.assert_close(value, whole[1][name], rtol=0, atol=2e-5)
