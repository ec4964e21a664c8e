"""The dense table of a routing: a layer written as products over it computes the sum over the choices."""

from __future__ import annotations

import pytest
import torch

from trilithon.parallel.moe.dense import dense_routing, dense_weights
from trilithon.parallel.moe.gate import RoutingRule, combine_weights, decide


@pytest.mark.parametrize("choice_major", [True, False])
@pytest.mark.parametrize("factor", [0.5, 1.0, None])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_layer_of_products_is_the_sum_over_choices(k, factor, choice_major):
    torch.manual_seed(3)
    logits, x, matrices = torch.randn(12, 4), torch.randn(12, 5), torch.randn(4, 5, 5)
    used = torch.arange(12) % 5 != 0
    rule = RoutingRule(k, factor, 1, "probs")
    probs = logits.softmax(1).requires_grad_()
    choice = decide(logits, probs, rule, used, None)
    weights = dense_weights(probs, choice, rule, choice_major=choice_major)
    inputs = torch.einsum("sec,sm->ecm", (weights != 0).float(), x)
    y = torch.einsum("sec,ecm->sm", weights, inputs @ matrices)
    expected = torch.zeros(12, 5)
    for token in range(12):
        for place in range(k):
            if choice.kept[token, place]:
                expert = int(choice.experts[token, place])
                share = combine_weights(probs, choice, rule)[token, place]
                expected[token] = expected[token] + share * (x[token] @ matrices[expert])
    assert torch.allclose(y, expected, atol=1e-5)
    assert int((weights != 0).sum()) == int(choice.kept.sum()) and (weights != 0).sum(0).max() <= 1
    assert weights.requires_grad and not weights[~used].any()


def test_slots_go_to_first_choices_or_in_order_of_tokens():
    logits = torch.tensor([[2.0, 1.0, -9.0], [1.0, 2.0, -9.0]])
    probs, rule = logits.softmax(1), RoutingRule(2, None, 1, "position")
    choice = decide(logits, probs, rule, None, None)
    by_choice, by_token = (dense_weights(probs, choice, rule, choice_major=major) != 0 for major in (True, False))
    assert by_choice[1, 1].tolist() == [True, False] and by_choice[0, 1].tolist() == [False, True]
    assert by_token[0, 1].tolist() == [True, False] and by_token[1, 1].tolist() == [False, True]


def test_the_routing_of_scores_alone_counts_its_balance_over_the_tokens_in_use():
    torch.manual_seed(4)
    logits, used = torch.randn(10, 4), torch.arange(10) < 7
    rule = RoutingRule(2, None, 1, "position")
    loss, weights, routed = dense_routing(logits, rule, used, counted=2)
    probs = logits.softmax(1)
    chosen = torch.bincount(probs[:7].topk(2).indices.reshape(-1), minlength=4)
    assert torch.equal(routed, chosen) and not weights[7:].any()
    torch.testing.assert_close(loss, 4 * (probs.mean(0) * chosen / 20).sum())
    torch.testing.assert_close(weights.sum((1, 2))[:7], torch.ones(7))


def test_what_a_routing_draws_follows_the_default_generator():
    logits, rule = torch.zeros(32, 2), RoutingRule(1, 1.0, 1, "rts", "RSample")
    tables = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        tables.append(dense_routing(logits, rule)[1] != 0)
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])
