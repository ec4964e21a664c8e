"""Compressed rules over a model whose layers were cut into tiles."""

import pytest
from torch import nn

import trilithon
from trilithon.errors import ConfigError


@pytest.mark.parametrize("kind", ["onebit_adam", "onebit_lamb", "zero_one_adam", "apmsqueeze"])
def test_tiles_are_refused_by_name_with_the_way_out(kind):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    trilithon.zero.tile(model, modules=["1"], out_splits=2, in_splits=1)
    with pytest.raises(ConfigError, match=rf"optimizer {kind}.*\['1'\].*untile"):
        trilithon.initialize(model, {"optimizer": {"kind": kind, "lr": 0.1}})
