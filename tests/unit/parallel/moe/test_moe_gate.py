"""Routing: the worked example, capacities, who keeps the slots, weights, losses and padding."""

import itertools
import math

import pytest
import torch

from trilithon.parallel.moe.balance import balance_loss, z_loss
from trilithon.parallel.moe.gate import (
    Gate,
    RoutingRule,
    choose,
    combine_weights,
    decide,
    keep_within,
    slots_per_expert,
)

P = torch.tensor(
    [[0.6, 0.3, 0.1], [0.5, 0.2, 0.3], [0.7, 0.1, 0.2], [0.2, 0.6, 0.2], [0.1, 0.3, 0.6], [0.4, 0.35, 0.25]],
    dtype=torch.float64,
)


def rule(k, policy="position", factor=1.0, minimum=0, **more):
    return RoutingRule(k, factor, minimum, policy, **more)


def route(k, policy="position", factor=1.0, *, minimum=0, generator=None, used=None, **more):
    return decide(P.log(), P, rule(k, policy, factor, minimum, **more), used, generator)


def kept(choice):
    """(token, expert) pairs that were dropped."""
    lost = (~choice.kept).nonzero().tolist()
    return {(s, int(choice.experts[s, j])) for s, j in lost}


def test_worked_example_with_one_choice():
    choice = route(1)
    assert choice.capacity == 2
    assert choice.routed.tolist() == [4, 1, 1]
    assert choice.kept_counts.tolist() == [2, 1, 1]
    assert kept(choice) == {(2, 0), (5, 0)}
    assert balance_loss(P, choice.experts, None).item() == pytest.approx(1.125, abs=1e-12)


def test_worked_example_of_the_lottery():
    draws = torch.tensor([0.1, 0.9, 0.5, 0.7, 0.2, 0.6], dtype=torch.float64)
    experts = choose(P, 1)
    mask = keep_within(experts, 2, draws.unsqueeze(1), None)
    assert mask[:, 0].tolist() == [False, True, False, True, True, True]


def test_worked_example_with_two_choices():
    choice = route(2)
    assert choice.capacity == 4
    assert choice.routed.tolist() == [5, 4, 3]
    assert balance_loss(P, choice.experts, None).item() == pytest.approx(1.0354166666666667, abs=1e-12)
    assert kept(choice) == {(3, 0)}  # token-major order would drop (5, 0)
    assert kept(route(2, "probs")) == {(3, 0)}


@pytest.mark.parametrize("factor", [0.1, 0.25, 1.0, 1.1, 1.25, 2.5])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(0, 4, 1), (1, 4, 2), (30, 3, 1), (70, 7, 2), (4096, 8, 1)])
def test_capacity_is_exact(factor, tokens, experts, k):
    """As decimals: 1.1 * 30 / 3 is 11, though the double nearest to 1.1 times 10 rounds up to 12 slots."""
    from decimal import ROUND_CEILING, Decimal

    wanted = (Decimal(str(factor)) * k * tokens / experts).to_integral_value(ROUND_CEILING)
    assert slots_per_expert(tokens, experts, k, factor, 0) == min(tokens, int(wanted))


def test_more_slots_than_tokens_are_clamped_and_the_minimum_may_exceed_them():
    assert slots_per_expert(2, 2, 1, 4.0, 4) == 2
    assert slots_per_expert(3, 8, 1, 1.0, 4) == 3


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("policy", ["position", "probs", "rts"])
def test_accounting_is_exact(k, policy):
    torch.manual_seed(3)
    for num_tokens, num_experts in itertools.product((0, 1, 5, 64), (4, 6)):
        logits = torch.randn(num_tokens, num_experts, dtype=torch.float64) * 3
        generator = torch.Generator().manual_seed(1)
        choice = decide(logits, logits.softmax(1), rule(k, policy, 0.8), None, generator)
        assert int(choice.routed.sum()) == k * num_tokens
        assert choice.kept_counts.tolist() == choice.routed.clamp(max=choice.capacity).tolist()
        found = torch.bincount(choice.experts[choice.kept], minlength=num_experts)
        assert found.tolist() == choice.kept_counts.tolist()
        assert all(len(set(row)) == k for row in choice.experts.tolist())


def test_negative_scores_keep_their_slots():
    """Tokens that did not choose an expert never take its slots, however negative the scores of those that did."""
    logits = torch.tensor([[-9.0, -10.0], [-8.0, -12.0], [-7.0, -30.0], [-20.0, -6.0]], dtype=torch.float64)
    choice = decide(logits, logits.softmax(1), rule(1, "probs", 1.0), None, None)
    assert choice.kept_counts.tolist() == [2, 1]
    assert kept(choice) == {(0, 0)}  # the least certain of the three


def test_ties_go_to_the_lower_expert():
    assert choose(torch.zeros(3, 5), 3).tolist() == [[0, 1, 2]] * 3


def test_weights_of_one_choice_are_its_probability_and_of_two_sum_to_one():
    one, two = route(1), route(2)
    assert torch.equal(combine_weights(P, one, rule(1))[:, 0], torch.where(one.kept[:, 0], P.max(1).values, 0.0))
    after = combine_weights(P, two, rule(2))
    assert after[3].tolist() == [1.0, 0.0]  # its second choice was dropped
    assert torch.allclose(after.sum(1), torch.ones(6, dtype=torch.float64), atol=1e-15)
    before = combine_weights(P, two, rule(2, norm_topk="pre_drop"))
    assert before[3].tolist() == [0.6 / 0.8, 0.0]
    assert torch.equal(combine_weights(P, two, rule(2, norm_topk="none"))[0], P[0, :2])


def test_padding_is_neither_routed_nor_counted():
    used = torch.tensor([True, True, False, True, True, False])
    choice = route(1, used=used)
    assert choice.routed.tolist() == [2, 1, 1]
    assert choice.kept[:, 0].tolist() == used.tolist()
    mine = balance_loss(P, choice.experts, used)
    rest = P[used]
    assert mine.item() == pytest.approx(balance_loss(rest, choose(rest, 1), None).item(), abs=1e-15)
    crowded = route(2, used=used, factor=0.5)  # two slots each
    assert int(crowded.kept[~used].sum()) == 0


def test_the_lottery_removes_the_bias_against_late_tokens():
    """Two of eight tokens find room; over many draws each of them equally often (16 x 0.25 within 6 deviations)."""
    logits = torch.zeros(8, 4, dtype=torch.float64)
    logits[:, 0] = 1.0
    total = torch.zeros(8)
    for seed in range(400):
        choice = decide(logits, logits.softmax(1), rule(1, "rts", 1.0), None, torch.Generator().manual_seed(seed))
        total += choice.kept[:, 0]
    assert (total - 100).abs().max() < 6 * math.sqrt(400 * 0.25 * 0.75)
    repeat = [
        decide(logits, logits.softmax(1), rule(1, "rts", 1.0), None, torch.Generator().manual_seed(7)).kept
        for _ in range(2)
    ]
    assert torch.equal(*repeat)


def test_noise_changes_choices_in_training_only():
    logits = torch.zeros(200, 4)
    noisy = rule(1, factor=None, noise="RSample")
    drawn = decide(logits, logits.softmax(1), noisy, None, torch.Generator().manual_seed(0))
    assert drawn.routed.min() > 20  # of 50 expected
    assert decide(logits, logits.softmax(1), noisy, None, None).routed.tolist() == [200, 0, 0, 0]
    second = rule(2, factor=None, sample_second=True)
    drawn = decide(logits, logits.softmax(1), second, None, torch.Generator().manual_seed(0))
    assert drawn.routed[0] == 200
    assert drawn.routed[1:].min() > 30
    gate = Gate(8, 4)
    x = torch.randn(5, 8)
    assert torch.equal(gate(x)[0], gate(x)[0])
    assert not torch.equal(gate(x)[0], gate(x, torch.Generator().manual_seed(1))[0])


def test_the_gate_computes_in_fp32_for_half_precision_and_under_autocast():
    gate = Gate(8, 4)
    x = torch.randn(5, 8).bfloat16()
    logits, probs = gate(x)
    assert logits.dtype == probs.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gate(x)[0], logits)


def test_balance_is_one_when_uniform_and_its_gradient_is_the_formula():
    uniform = torch.full((12, 4), 0.25, dtype=torch.float64)
    experts = torch.arange(12).remainder(4).unsqueeze(1)
    assert balance_loss(uniform, experts, None).item() == pytest.approx(1.0, abs=1e-15)
    probs = P.clone().requires_grad_(True)
    balance_loss(probs, choose(P, 2), None).backward()
    share = torch.tensor([5.0, 4.0, 3.0], dtype=torch.float64) / 6
    assert torch.allclose(probs.grad, (3 / 2 * share / 6).expand(6, 3), atol=1e-15)


def test_scopes_of_the_balance_loss():
    first = balance_loss(P, choose(P, 2), None, counts="first")
    assert first.item() == pytest.approx(1.125, abs=1e-12)
    by_sequence = balance_loss(P, choose(P, 1), None, num_sequences=2)
    halves = [balance_loss(part, choose(part, 1), None) for part in P.chunk(2)]
    assert by_sequence.item() == pytest.approx(float(sum(halves) / 2), abs=1e-15)
    parts = [P[:4], P[4:]]  # two ranks with different numbers of tokens
    counts = []
    for part in parts:
        balance_loss(part, choose(part, 1), None, total=lambda v: (counts.append(v), (v, 1))[1])
    whole = sum(counts)
    each = [balance_loss(part, choose(part, 1), None, total=lambda v: (whole, 2)) for part in parts]
    assert float(sum(each) / 2) == pytest.approx(1.125, abs=1e-12)


def test_z_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    by_hand = (math.log(2) ** 2 + (1 + math.log(2)) ** 2) / 2
    assert z_loss(logits, None).item() == pytest.approx(by_hand, abs=1e-15)
    assert z_loss(logits, torch.tensor([False, True])).item() == pytest.approx((1 + math.log(2)) ** 2, abs=1e-15)
