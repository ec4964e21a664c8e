"""A parameter leads to the engine that trains it, as long as that is open."""

from __future__ import annotations

import gc

import torch
from torch import nn

import trilithon
from trilithon.engine.owners import engine_of, newest


def test_a_parameter_knows_its_engine_and_its_name_until_the_engine_is_closed():
    first, second = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2))
    with trilithon.initialize(first, {"optimizer": "adamw"}) as one:
        with trilithon.initialize(second, {"optimizer": "adamw", "zero": {"stage": 1}}) as other:
            assert engine_of(first.weight) == (one, "weight") and engine_of(second[0].bias) == (other, "0.bias")
            assert newest() is other
        assert engine_of(second[0].bias) == (None, "") and newest() is None
        assert engine_of(first.weight) == (one, "weight")
    assert engine_of(first.weight) == engine_of(torch.ones(2)) == (None, "")


def test_an_engine_that_nobody_holds_is_not_kept():
    model = nn.Linear(3, 2)
    engine = trilithon.initialize(model, {"optimizer": "adamw"})
    engine.close()
    trilithon.initialize(model, {"optimizer": "adamw"})
    gc.collect()
    assert newest() is None and engine_of(model.weight)[0] is None
