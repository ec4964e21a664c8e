"""Tokens that travel inside nodes first train to the same bits, for the bytes of the formula; what does not fit."""

import pytest
import torch
import torch.distributed as dist
from moe_models import EPS, EXPERTS, WIDTH, Mixed, batches

import trilithon
from trilithon.errors import ConfigError
from trilithon.testing.ranks import ranks

GREEDY = {"top2_2nd_expert_sampling": False, "drop_policy": "position"}
TWO_LEVELS = {"all_to_all": "hierarchical", "node_size": 2}


def engine_for(model, stage=2, **moe):
    return trilithon.initialize(
        model, {"zero": {"stage": stage}, "optimizer": {"kind": "adam", "lr": 1e-2, "eps": EPS}, "moe": moe}
    )


@pytest.mark.parametrize("drop", [True, False])
@ranks(4, timeout_s=90)
def test_training_gives_the_same_bits_as_with_the_flat_exchange(world_size, drop):
    rank, data, found = dist.get_rank(), batches(3, 22), []
    sizes = [9, 0, 8, 5]
    for moe in ({}, TWO_LEVELS):
        model = Mixed(ep_sizes=(4, 2), k=2, capacity_factor=0.75, min_capacity=1, drop_tokens=drop, **GREEDY)
        engine = engine_for(model, 2, **moe)
        for batch in data:
            engine.backward(engine(batch.split(sizes)[rank]))
            engine.step()
        groups = {row.group for row in engine.ledger.rows() if row.kind == "all_to_all"}
        assert ("experts/4 on nodes" in groups) == bool(moe)
        assert "experts/2" in groups  # two neighbours are on one node: nothing to do in two steps
        found.append({name: value.clone() for name, value in engine.view("master")})
        engine.close()
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@ranks(4)
def test_bytes_are_those_of_the_formula(world_size):
    """(G - 1)/G + (N - 1)/N of the rows instead of (N G - 1)/(N G), in G - 1 + N - 1 messages; both ways, and back."""
    tokens, k, itemsize, nodes, on_one = 24, 2, 8, 2, 2
    engine = engine_for(Mixed(ep_sizes=(4,), k=k, capacity_factor=1.0, **GREEDY), **TWO_LEVELS)
    x = torch.randn(tokens, WIDTH, dtype=torch.float64)
    rows = EXPERTS * (tokens * k // EXPERTS) * WIDTH * itemsize
    one_way = rows * (on_one - 1) // on_one + rows * (nodes - 1) // nodes
    with engine.ledger.measure() as forward:
        loss = engine(x)
    assert forward.all_to_all_bytes == 2 * one_way
    assert forward.calls == 2 + 2 * 2  # two agreements on the number of slots, two steps there and two back
    with engine.ledger.measure() as backward:
        engine.backward(loss)
    assert backward.all_to_all_bytes == 2 * one_way
    engine.close()


@ranks(2)
def test_nodes_have_to_be_known_and_to_hold_groups_evenly(world_size, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE is ''. Set moe\.node_size"):
        engine_for(Mixed(ep_sizes=(2,)), all_to_all="hierarchical")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    engine = engine_for(Mixed(ep_sizes=(2,)), all_to_all="hierarchical")
    assert not any("node" in row.group for row in engine.ledger.rows())
    engine.close()


@ranks(3)
def test_a_group_that_lies_unevenly_on_nodes_is_refused(world_size):
    torch.manual_seed(0)
    model = torch.nn.Sequential(trilithon.MoE(8, trilithon.moe.FeedForward(8, 8), 3, ep_size=3))
    with pytest.raises(ConfigError, match=r"expert group \[0, 1, 2\] has \[2, 1\]"):
        engine_for(model, **TWO_LEVELS)
