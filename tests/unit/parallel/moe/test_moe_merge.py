"""Aggregation of two mixtures, and pruning: identities that hold exactly."""

import copy

import pytest
import torch
from torch import nn

from trilithon.errors import ConfigError
from trilithon.parallel.moe import (
    FeedForward,
    MoE,
    Utilization,
    aggregate,
    choose_experts,
    convert,
    keep_experts,
    layers,
    load_report,
    prune,
)
from trilithon.parallel.moe.merge import layer_names

M = 6


def model(num_experts=3, seed=0, k=1):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(M, M), FeedForward(M, 8), nn.Linear(M, M)).double()
    convert(made, num_experts, where="1", init="independent", k=k, top2_2nd_expert_sampling=False)
    return made.eval()


def test_aggregation_holds_the_experts_of_both_and_the_mean_of_the_rest():
    first, second = model(3, 0), model(2, 1)
    big = model(5)
    big.load_state_dict(aggregate(first.state_dict(), second.state_dict()))
    a, b, both = first[1].moe.experts, second[1].moe.experts, big[1].moe.experts
    assert torch.equal(
        both.get_parameter("up.weight"), torch.cat((a.get_parameter("up.weight"), b.get_parameter("up.weight")))
    )
    assert torch.equal(big[0].weight, (first[0].weight + second[0].weight) / 2)


def test_without_the_second_half_the_first_model_is_left():
    """Dense parameters of the first, and a router that never chooses the second's experts: the same outputs exactly."""
    first, second, x = model(3, 0), model(2, 1), torch.randn(20, M, dtype=torch.float64)
    big = model(5)
    big.load_state_dict(aggregate(first.state_dict(), second.state_dict(), dense="first"))
    prune(big, {"1.moe": [0, 1, 2]})
    assert torch.equal(big(x), first(x))


def test_models_that_do_not_match_are_refused():
    with pytest.raises(ConfigError, match="different layers of experts"):
        aggregate(model().state_dict(), nn.Linear(M, M).state_dict())
    other = model()
    other[0] = nn.Linear(M, M, bias=False).double()
    with pytest.raises(ConfigError, match=r"differ in parameters: \['0.bias'\]"):
        aggregate(model().state_dict(), other.state_dict())


def test_pruning_reweighs_by_what_is_left():
    """A token whose choice is kept: new weight p_e / sum over kept p_j; experts' outputs stay what they were."""
    small = model(4, 3)
    layer, x = small[1].moe, torch.randn(40, M, dtype=torch.float64)
    _, probs = layer.gate(x)
    old, chosen = layer(x)[0], probs.argmax(1)
    kept = [0, 2, 3]
    prune(small, {"1.moe": kept})
    new = layer(x)[0]
    stays = torch.isin(chosen, torch.tensor(kept))
    assert stays.any()
    factor = 1 / probs[:, kept].sum(1, keepdim=True)
    assert torch.allclose(new[stays], (old * factor)[stays], rtol=0, atol=1e-13)
    assert layer.num_experts == layer.experts.here == 3


def test_which_experts_are_kept():
    counts = {"a": torch.tensor([5, 0, 9, 5]), "b": torch.tensor([1, 2, 3, 4])}
    assert choose_experts(counts, 2, "utilization") == {"a": [0, 2], "b": [2, 3]}
    drawn = choose_experts(counts, 2, "random", seed=1)
    assert drawn == choose_experts(counts, 2, "random", seed=1)
    assert len({tuple(choose_experts(counts, 2, "random", seed=s)["a"]) for s in range(20)}) > 3
    with pytest.raises(ConfigError, match="5 experts cannot be kept of 4"):
        choose_experts(counts, 5, "random")


def test_utilization_counts_over_a_calibration_set():
    small, x = model(3, k=2), torch.randn(7, M, dtype=torch.float64)
    with Utilization(small) as seen:
        small(x)
        small(x[:3])
    small(x)
    assert int(seen.counts["1.moe"].sum()) == 2 * 10
    by_hand = [small[1].moe(small[0](part))[2] for part in (x, x[:3])]
    assert torch.equal(seen.counts["1.moe"], by_hand[0] + by_hand[1])


def test_expert_in_the_name_of_a_dense_parameter_means_nothing():
    state = {"expert_head.weight": torch.ones(3, 3), "experts.note": torch.ones(2), **model().state_dict()}
    out = keep_experts(state, {"1.moe": [1]})
    assert torch.equal(out["expert_head.weight"], state["expert_head.weight"])
    assert torch.equal(out["experts.note"], state["experts.note"])
    with pytest.raises(ConfigError, match=r"\['head'\] are no layers"):
        keep_experts(state, {"head": [0]})
    with pytest.raises(ConfigError, match="distinct"):
        keep_experts(state, {"1.moe": [1, 1]})


def test_a_state_that_is_one_layer_has_it_too():
    alone = MoE(M, FeedForward(M, 8, gated=True), 4).state_dict()
    assert layer_names(alone) == [""]
    assert layer_names({"aggregate.weight": torch.ones(2, 2), **alone}) == [""]
    assert keep_experts(alone, {"": [2]})["experts.gate.weight"].shape == (1, 8, M)


def test_pruning_refuses_what_does_not_fit_and_changes_nothing():
    layer = MoE(M, FeedForward(M, 8), 4, k=2, ep_size=2)
    whole = nn.Sequential(layer)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ConfigError, match="k=2 experts per token of 1"):
        prune(whole, {"0": [3]})
    with pytest.raises(ConfigError, match="3 experts do not split over ep_size=2"):
        prune(whole, {"0": [0, 1, 3]})
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert [name for name, _ in layers(whole)] == ["0"]
    assert load_report(whole) == {}
