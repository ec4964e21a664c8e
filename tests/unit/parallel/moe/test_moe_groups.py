"""Which ranks share out the experts, in both orders, and which degrees fit."""

import pytest

from trilithon.errors import ConfigError
from trilithon.parallel.moe.groups import ExpertAxes, resolve_ep_size


def test_eight_ranks_in_pairs_in_both_orders():
    neighbours, apart = ExpertAxes(8, 2), ExpertAxes(8, 2, data_first=True)
    ranks = range(8)
    assert neighbours.expert_groups(ranks) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert neighbours.expert_data_groups(ranks) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert apart.expert_groups(ranks) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert apart.expert_data_groups(ranks) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("data_first", [False, True])
@pytest.mark.parametrize("ep_size", [1, 2, 3, 6])
def test_every_rank_is_in_one_group_of_each_kind_at_its_place(ep_size, data_first):
    axes = ExpertAxes(6, ep_size, data_first)
    ranks = [10, 20, 30, 40, 50, 60]
    experts, data = axes.expert_groups(ranks), axes.expert_data_groups(ranks)
    assert sorted(r for g in experts for r in g) == sorted(r for g in data for r in g) == ranks
    for index, rank in enumerate(ranks):
        ep, edp = axes.place(index)
        assert experts[edp][ep] == data[ep][edp] == rank


def test_degrees_of_layers_with_different_numbers_of_experts():
    """128 ranks, 32, 64 and 128 experts: one expert per rank in every layer."""
    assert [resolve_ep_size("l", None, experts, 128) for experts in (32, 64, 128)] == [32, 64, 128]
    assert resolve_ep_size("l", None, 6, 4) == 2
    assert resolve_ep_size("l", 2, 6, 4) == 2


def test_a_degree_that_does_not_fit_names_the_layer_and_those_that_do():
    with pytest.raises(
        ConfigError, match=r"blocks\.1\.moe: ep_size=4 does not divide the 6 .*can be 1, 2; None takes 2"
    ):
        resolve_ep_size("blocks.1.moe", 4, 8, 6)
    with pytest.raises(ConfigError, match=r"head: 6 experts do not split over ep_size=4"):
        resolve_ep_size("head", 4, 6, 8)


def test_groups_on_nodes():
    """Eight ranks, nodes of four: a group of eight lies on two nodes, one of two on one."""
    ranks = range(8)
    whole = ExpertAxes(8, 8)
    assert whole.node_groups(ranks, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert whole.peer_groups(ranks, 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert whole.levels(ranks, 4) == (2, 4)
    assert ExpertAxes(8, 2).levels(ranks, 4) == (1, 2)
    assert ExpertAxes(8, 2, data_first=True).levels(ranks, 4) == (2, 1)
    assert ExpertAxes(8, 4, data_first=True).node_groups(ranks, 4) == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_groups_that_lie_unevenly_on_nodes_are_refused():
    with pytest.raises(ConfigError, match=r"expert group \[0, 1, 2, 3, 4, 5\] has \[4, 2\].*or 'flat'"):
        ExpertAxes(6, 6).levels(range(6), 4)
    with pytest.raises(ConfigError, match="expert groups of 2 ranks lie differently"):
        ExpertAxes(8, 2).levels([0, 1, 2, 3, 4, 5, 6, 8], 4)
