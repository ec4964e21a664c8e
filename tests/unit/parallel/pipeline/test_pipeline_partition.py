"""Cutting a list of layers into stages."""

from __future__ import annotations

import itertools
import random

import pytest

from trilithon.errors import ConfigError
from trilithon.parallel.pipeline.partition import cut_by_weight, weights_by_method


def heaviest(weights, bounds):
    return max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))


def test_the_heaviest_part_is_as_light_as_any_cut_makes_it():
    chance = random.Random(0)
    for _ in range(400):
        count = chance.randint(1, 8)
        parts = chance.randint(1, count)
        weights = [chance.choice([0.0, 1.0, 2.0, 5.0, chance.random()]) for _ in range(count)]
        bounds = cut_by_weight(weights, parts)
        assert bounds[0] == 0 and bounds[-1] == count and len(bounds) == parts + 1
        assert all(a < b for a, b in itertools.pairwise(bounds))
        every = [(0, *cuts, count) for cuts in itertools.combinations(range(1, count), parts - 1)]
        assert heaviest(weights, bounds) <= min(heaviest(weights, cut) for cut in every) * (1 + 1e-9)


def test_an_embedding_as_heavy_as_five_blocks_takes_their_place():
    bounds = cut_by_weight([5.0] + [1.0] * 70 + [5.0], 8)
    assert heaviest([5.0] + [1.0] * 70 + [5.0], bounds) == 10.0


def test_methods_weigh_layers():
    numel, classes = [100, 0, 10, 10], ["Embedding", "Dropout", "GPTBlock", "Head"]
    assert weights_by_method("parameters", numel, classes) == [100.0, 0.0, 10.0, 10.0]
    assert weights_by_method("uniform", numel, classes) == [1.0] * 4
    assert weights_by_method("type:block|embed", numel, classes) == [1.0, 0.0, 1.0, 0.0]
    assert weights_by_method("parameters", [0, 0], ["A", "B"]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: cut_by_weight([1.0, 2.0], 3), "2 layers do not make 3 stages"),
        (lambda: cut_by_weight([1.0, -2.0], 1), "must not be negative"),
        (lambda: weights_by_method("type:lstm", [1], ["Block"]), "fits no layer; their classes are Block"),
        (lambda: weights_by_method("type:(", [1], ["Block"]), "is not a regular expression"),
        (lambda: weights_by_method("best", [1], ["Block"]), "there are 'parameters', 'uniform'"),
    ],
)
def test_what_cannot_be_cut_is_refused(call, text):
    with pytest.raises(ConfigError, match=text):
        call()
