"""loss = f(x1) + f(x2), then one backward, with accumulation 1 and 2: the gradient is that of plain PyTorch."""

import pytest

from against_plain import STAGES, assert_trains_like_plain
from trilithon.testing import ranks
from trilithon.testing.models import MLP, SharedLayerNet


@ranks(2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("model", [MLP, SharedLayerNet])
def test_two_forwards_before_a_backward(accumulation, model):
    def loss_of(call, x, target):
        return call(x, target) + call(x * 0.5 + 1.0, target)

    for stage in STAGES:
        assert_trains_like_plain(model, stage, accumulation=accumulation, loss_of=loss_of)
