"""What is not a tensor comes back with its type, and what is not plain data is refused with its place."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from pathlib import PurePath

import numpy as np
import pytest
import torch

from trilithon.checkpoint.plain import from_json, to_json
from trilithon.errors import CheckpointError


def there_and_back(value):
    return from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**70,
        -0.0,
        1e-320,
        math.inf,
        "text \u2028 \x00",
        (1, [2, (3,)], {"a": (4,)}),
        {1: "int key", (2, 3): "tuple key", "$tuple": "looks like a mark"},
        {"$one": 1},
        {1, 2},
        b"\x00\xff",
        Counter({3: 2}),
        PurePath("a/b"),
        [argparse.Namespace(a=(1, {2}), b=argparse.Namespace())],
        torch.float16,
        random.getstate(),
        {},
        [],
        (),
    ],
)
def test_plain_data_comes_back_as_it_was(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_tensors_and_arrays_come_back():
    assert math.isnan(there_and_back(float("nan")))
    for tensor in (
        torch.arange(6).view(2, 3),
        torch.tensor(2.5),
        torch.ones(3, dtype=torch.bfloat16),
        torch.zeros(0, 4),
    ):
        back = there_and_back(tensor)
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
        assert back.shape == tensor.shape
    state = there_and_back(np.random.get_state())
    assert state[0] == "MT19937"
    assert np.array_equal(state[1], np.random.get_state()[1])
    assert there_and_back(np.float64(1.5)) == 1.5


@pytest.mark.parametrize("value", [object(), {"run": {"fn": print}}, [1, [lambda: 0]]])
def test_objects_are_refused_with_their_place(value):
    with pytest.raises(CheckpointError, match="plain data") as refusal:
        to_json({"client_state": value})
    assert str(refusal.value).startswith("client_state")
