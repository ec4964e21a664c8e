"""C053: choosing batch sizes without a world size is a typed error that names what is missing."""

from __future__ import annotations

import pytest

from trilithon.config import Config, data_parallel_size
from trilithon.errors import ConfigError


@pytest.mark.parametrize("missing", [0, None, -2])
@pytest.mark.parametrize("sizes", [{}, {"global_size": 8}, {"micro_size": 2}, {"global_size": 8, "accumulation": 2}])
def test_sizes_are_never_divided_by_a_missing_number_of_ranks(missing, sizes):
    with pytest.raises(ConfigError, match="data_parallel_size="):
        Config.load({"batch": sizes}).resolve_batch(missing)
    with pytest.raises(ConfigError, match="world_size="):
        data_parallel_size(missing)


@pytest.mark.parametrize("version", [0.1, 0.2])
def test_the_elastic_block_is_refused_by_name_at_each_version(version):
    elastic = {"enabled": True, "version": version, "max_train_batch_size": 8, "micro_batch_sizes": [2]}
    with pytest.raises(ConfigError, match="elasticity: choosing batch sizes from a range of world sizes is not in"):
        Config.load({"elasticity": {**elastic, "model_parallel_size": 2}, "train_batch_size": 8})
    off = Config.load({"elasticity": {**elastic, "enabled": False}, "train_batch_size": 8}, deepspeed_release="0.16")
    assert "elasticity: no effect: it is off" in off.notes


def test_the_micro_batch_follows_the_data_parallel_size():
    config = Config.load({"batch": {"global_size": 24}})
    for world, model_parallel, micro in ((4, 1, 6), (4, 2, 12), (8, 2, 6)):
        assert config.resolve_batch(data_parallel_size(world, model_parallel)).micro_size == micro
    with pytest.raises(ConfigError, match=r"world_size=3 .* model_parallel_size=2"):
        data_parallel_size(3, 2)
