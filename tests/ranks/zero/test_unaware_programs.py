"""Modules with cut parameters under `state_dict()` and `to()` of programs that know nothing of slices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trilithon
from trilithon.errors import ShardedParameterError
from trilithon.testing import ranks


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0))
        self.register_buffer("seen", torch.ones(2, dtype=torch.float64))


@ranks(2)
def test_cut_parameters_show_as_shapes_and_stay_where_they_are():
    with trilithon.zero.init():
        model = Counted()
    with pytest.raises(ShardedParameterError):
        model.state_dict()
    with pytest.raises(ShardedParameterError):
        model.to(torch.float16)
    trilithon.zero.allow_unaware(model)
    state = model.state_dict()
    assert state["weight"].is_meta and state["weight"].shape == (8,) and torch.equal(state["seen"], model.seen)
    assert model.to(torch.float16) is model
    assert model.seen.dtype is torch.float16 and model.weight.dtype is torch.float32
    assert trilithon.zero.is_cut(model.weight)
    with trilithon.zero.gathered(model):
        assert torch.equal(model.state_dict()["weight"], torch.arange(8.0))
    trilithon.zero.allow_unaware(model, allow=False)
    with pytest.raises(ShardedParameterError):
        model.state_dict()
