"""Tiled layers at stage 3: the same training, less memory at once, and the plain model's names everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trilithon
from against_plain import assert_trains_like_plain
from trilithon.errors import ConfigError
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import vector_batches
from trilithon.zero.tiling import Tile

ADAMW = {"kind": "adamw", "lr": 1e-2}


def model() -> MLP:
    return MLP(width=24, out=6)


@ranks(1, 3)
def test_a_tiled_model_trains_like_the_plain_one(world_size: int):
    batches = vector_batches(2, 2 * world_size, 2, width=24, out=6)
    assert_trains_like_plain(model, 3, batches=batches, accumulation=2, zero={"stage": 3, "tile_above_numel": 100})
    tiled = lambda m: trilithon.zero.tile(m, modules=["layers.*"], in_splits=2, out_splits=3) and None  # noqa: E731
    for stage in (1, 3):
        assert_trains_like_plain(model, stage, batches=batches, accumulation=2, change=tiled)


@ranks(2)
def test_views_and_state_dict_have_the_names_of_the_plain_model(world_size: int):
    plain, expected = model(), dict(model().named_parameters())
    first = plain.last.weight
    engine = trilithon.initialize(plain, {"zero": {"stage": 3, "tile_above_numel": 100}, "optimizer": ADAMW})
    assert [unit.name for unit in engine._sharding.units if "tiles" in unit.name]
    assert {name: v.shape for name, v in engine.full_parameters()} == {name: v.shape for name, v in expected.items()}
    assert all(torch.equal(v, expected[name]) for name, v in engine.state_dict().items())
    for batch in vector_batches(1, 2, 1, width=24, out=6)[0]:
        engine.backward(engine(*batch))
    assert {name for name, _ in engine.view("grad")} == set(expected)
    engine.step()
    assert [(name, v.shape) for name, v in engine.view("exp_avg", "last.*")] == [
        ("last.weight", (6, 24)), ("last.bias", (6,))
    ]  # fmt: skip
    whole = dict(engine.full_parameters())
    engine.close()
    assert plain.last.weight is first and type(plain.last) is nn.Linear
    assert all(torch.equal(param, whole[name]) for name, param in plain.named_parameters())


@ranks(2)
def test_lamb_scales_by_the_norm_of_the_whole_weight(world_size: int):
    batches = vector_batches(3, 2, 1, width=24, out=6)
    ends = []
    for limit in (None, 100):
        zero = {"stage": 3, "tile_above_numel": limit}
        with trilithon.initialize(model(), {"zero": zero, "optimizer": {"kind": "lamb", "lr": 0.01}}) as engine:
            for micro_batches in batches:
                engine.train_step(micro_batches)
            ends.append(dict(engine.full_parameters()))
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name], rtol=1e-4, atol=1e-6), name


def live_at_most(engine: trilithon.Engine, net: nn.Module) -> int:
    """Bytes of whole values when a layer or tile begins its forward."""
    seen: list[int] = []
    for module in net.modules():
        if isinstance(module, nn.Linear | Tile):
            module.register_forward_pre_hook(lambda *_: seen.append(engine.memory()["in_flight"]))
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    return max(seen)


@ranks(2)
def test_the_memory_at_one_time_falls_with_the_number_of_tiles(world_size: int):
    """The layer is the whole model: whole at once are one tile, and one that is read ahead."""
    peaks = {}
    for out_splits in (1, 8):
        net = nn.Sequential(nn.Linear(64, 256), nn.Flatten())
        if out_splits > 1:
            trilithon.zero.tile(net, modules=["0"], out_splits=out_splits)
        engine = trilithon.initialize(net, {"zero": {"stage": 3, "bucket_numel": 1}, "optimizer": ADAMW})
        peaks[out_splits] = live_at_most(engine, net)
        engine.step()
        engine.close()
    assert peaks[1] == 4 * 256 * 65
    assert peaks[8] <= 2 * peaks[1] / 8 + 2 * 4 * 128  # and padding


@ranks(2)
def test_a_model_built_in_slices_is_tiled_in_slices(world_size: int):
    with trilithon.zero.init(open_numel=0):
        net = model()
    trilithon.zero.tile(net, above_numel=100)
    sharded = [type(param).__name__ for param in net.parameters()]
    assert set(sharded) == {"ShardedParameter"}
    engine = trilithon.initialize(net, {"zero": {"stage": 3}, "optimizer": ADAMW})
    whole = dict(engine.full_parameters())
    engine.close()
    shapes = {name: param.shape for name, param in model().named_parameters()}
    assert {name: value.shape for name, value in whole.items()} == shapes
    assert all(value.isfinite().all() and value.abs().sum() > 0 for value in whole.values())


@ranks(2)
def test_a_tied_weight_that_is_named_is_refused_alike_on_all_ranks(world_size: int):
    net = model()
    net.layers[1].weight = net.layers[0].weight
    zero = {"stage": 3, "tile_above_numel": 100, "tile_modules": ["layers.1"]}
    with pytest.raises(ConfigError, match=r"'layers.1' cannot be tiled: another module holds the same weight"):
        trilithon.initialize(net, {"zero": zero, "optimizer": ADAMW})
