"""Dropout masks depend on the draw and on the place in the whole tensor, not on who computes them."""

from __future__ import annotations

import math

import pytest
import torch

from trilithon.parallel import Dropout
from trilithon.parallel.dropout import keep_mask

SHAPE = (4, 6, 8)


@pytest.mark.parametrize("cut", [(2, 1, 1), (1, 3, 1), (1, 1, 4), (2, 2, 2)])
def test_parts_of_a_mask_are_the_mask_of_the_parts(cut):
    whole = keep_mask(7, 0.3, SHAPE, [(0, 1)] * 3)
    part = tuple(size // parts for size, parts in zip(SHAPE, cut))
    for place in torch.cartesian_prod(*(torch.arange(parts) for parts in cut)).tolist():
        here = keep_mask(7, 0.3, part, list(zip(place, cut)))
        expected = whole[tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, part))]
        assert torch.equal(here, expected)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_kept_is_that_asked_for_in_rows_columns_and_between_draws(p):
    numel = 1 << 16
    first, second = (keep_mask(draw, p, (256, 256), [(0, 1)] * 2).float() for draw in (1, 2))
    limit = 5 * math.sqrt(p * (1 - p) / numel)  # five standard deviations
    assert abs(first.mean() - (1 - p)) < limit
    edge = 5.5 * math.sqrt(p * (1 - p) / 256)  # of 512 rows and columns
    assert (first.mean(0) - (1 - p)).abs().max() < edge
    assert (first.mean(1) - (1 - p)).abs().max() < edge
    together = ((first - (1 - p)) * (second - (1 - p))).mean() / (p * (1 - p))
    neighbours = ((first[:, 1:] - (1 - p)) * (first[:, :-1] - (1 - p))).mean() / (p * (1 - p))
    assert max(abs(together), abs(neighbours)) < 5 / math.sqrt(numel - 256)


def test_restoring_the_generator_replays_the_mask_and_two_calls_differ():
    dropout, x = Dropout(0.5), torch.ones(2, 3, 8, requires_grad=True)
    state = torch.get_rng_state()
    first, second = dropout(x), dropout(x)
    torch.set_rng_state(state)
    again = dropout(x)
    assert torch.equal(first, again) and not torch.equal(first, second)
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())  # kept elements are scaled by 2 in both directions
    assert set(first.unique().tolist()) == {0.0, 2.0}


def test_nothing_is_drawn_or_dropped_in_evaluation():
    dropout, x = Dropout(0.5).eval(), torch.ones(4)
    state = torch.get_rng_state()
    assert dropout(x) is x
    assert torch.equal(state, torch.get_rng_state())
