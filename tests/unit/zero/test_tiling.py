"""A tiled linear layer is the plain one: forward, gradients, state dict, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from trilithon.errors import ConfigError
from trilithon.testing.models import MLP, TinyGPT
from trilithon.zero import TiledLinear, tile, untile
from trilithon.zero.layout import Region

EPS = torch.finfo(torch.float32).eps


def gamma(terms: int) -> float:
    """Relative error of a sum of `terms` products in fp32 in any order (Higham 2002, section 3.1), taken twice."""
    return 2 * terms * EPS / (1 - terms * EPS)


@pytest.mark.parametrize("bias", [True, False])
def test_values_of_a_plain_layer_can_be_taken_and_left_there(bias):
    plain, tiled = nn.Linear(10, 6, bias=bias), TiledLinear(10, 6, bias, in_splits=3, out_splits=2)
    tiled.copy_from(plain)
    assert torch.equal(tiled.weight, plain.weight) and (not bias or torch.equal(tiled.bias, plain.bias))
    assert tiled.weight.data_ptr() != plain.weight.data_ptr() and plain.weight.shape == (6, 10)
    with pytest.raises(RuntimeError, match="size mismatch"):
        tiled.copy_from(nn.Linear(10, 5, bias=bias))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12)])
@pytest.mark.parametrize("splits", [(1, 1), (1, 3), (2, 1), (3, 4), (5, 7), (12, 10)])
def test_forward_and_gradients_are_those_of_the_plain_layer(splits, shape, bias):
    plain = nn.Linear(12, 10, bias=bias)
    x, weight = torch.randn(shape), plain.weight.detach().clone()
    copy = nn.Linear(12, 10, bias=bias)
    copy.load_state_dict(plain.state_dict())
    tiled = TiledLinear.of(copy, in_splits=splits[0], out_splits=splits[1])
    results = []
    for layer in (plain, tiled):
        given = x.clone().requires_grad_()
        output = layer(given)
        (output * torch.arange(output.numel()).view_as(output).cos()).sum().backward()
        own = [layer.weight.grad] if layer is plain else [joined_gradient(tiled, "weight")]
        if bias:
            own.append(layer.bias.grad if layer is plain else joined_gradient(tiled, "bias"))
        results.append((output.detach(), given.grad, *own))
    rows = x.reshape(-1, 12).abs()
    upstream = torch.ones(rows.shape[0], 10)  # |cos| <= 1
    bounds = [
        (rows @ weight.abs().T + (plain.bias.detach().abs() if bias else 0)).view(*shape[:-1], 10) * gamma(13),
        (upstream @ weight.abs()).view(shape) * gamma(10),
        (upstream.T @ rows) * gamma(rows.shape[0]),
        upstream.sum(0) * gamma(rows.shape[0]),
    ]
    for expected, got, bound in zip(*results, bounds, strict=False):
        assert ((expected - got).abs() <= bound + 1e-12).all()


def joined_gradient(tiled: TiledLinear, kind: str) -> torch.Tensor:
    return tiled._joined(kind, [getattr(t, kind).grad if getattr(t, kind) is not None else None for t in tiled.tiles])


def test_row_tiles_are_the_same_products_bit_for_bit_where_the_backend_computes_rows_apart():
    x, plain = torch.randn(8, 64), nn.Linear(64, 48)
    pieces = torch.cat(
        [nn.functional.linear(x, *rows) for rows in zip(plain.weight.split(16), plain.bias.split(16))], 1
    )
    expected = plain(x)
    got = TiledLinear.of(plain, out_splits=3)(x)
    assert torch.equal(got, pieces)
    if torch.equal(pieces, expected):  # what the matrix product of this machine does with fewer columns
        assert torch.equal(got, expected)
    assert torch.allclose(got, expected, rtol=0, atol=64 * EPS * 8)


def test_the_state_dict_has_the_names_shapes_and_values_of_the_plain_model():
    model, reference = MLP(width=12, out=5), MLP(width=12, out=5)
    assert tile(model, above_numel=50) == ["layers.0", "layers.1", "last"]
    assert len(model.last.tiles) == 2 and len(model.layers[0].tiles) == 3
    state, expected = model.state_dict(), reference.state_dict()
    assert set(state) == set(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    other = MLP(width=12, out=5, seed=1).state_dict()
    assert not model.load_state_dict(other).missing_keys
    assert all(torch.equal(model.state_dict()[name], other[name]) for name in other)
    assert torch.equal(model.last.weight, other["last.weight"])


def test_what_does_not_fit_when_loading_is_said_under_the_plain_names():
    model = MLP(width=12, out=5)
    tile(model, modules=["last"], out_splits=2, in_splits=2)
    state = model.state_dict()
    short = {name: value for name, value in state.items() if name != "last.weight"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"last.weight"'):
        model.load_state_dict(short)
    assert model.load_state_dict(short, strict=False).missing_keys == ["last.weight"]
    with pytest.raises(RuntimeError, match=r"size mismatch for last.weight: \(5, 11\) given, \(5, 12\) here"):
        model.load_state_dict({**state, "last.weight": torch.zeros(5, 11)})


def test_untile_gives_the_same_module_and_parameters_back():
    model = MLP(width=12, out=5)
    layer, weight = model.last, model.last.weight
    values = weight.detach().clone()
    tile(model, modules=["last"], in_splits=3, out_splits=2)
    assert model.last is not layer and weight.numel() == 0
    with torch.no_grad():
        model.last.tiles[0].weight.add_(1.0)
    untile(model)
    values[:2, :4] += 1.0
    assert model.last is layer and model.last.weight is weight and torch.equal(weight, values)


def test_layers_that_cannot_be_tiled_are_refused_by_name_or_left_alone(caplog):
    model = TinyGPT(tied=True)
    assert "head" not in tile(model, above_numel=500)
    assert "linear layer 'head' is not tiled: another module holds the same weight" in caplog.text
    for name, change in {
        "head": lambda m: None,
        "blocks.0.up": lambda m: m.blocks[0].up.register_forward_hook(lambda *_: None),
        "blocks.0.down": lambda m: nn.utils.parametrizations.weight_norm(m.blocks[0].down),
    }.items():
        model = TinyGPT(tied=True)
        change(model)
        with pytest.raises(ConfigError, match=f"linear layer '{name}' cannot be tiled"):
            tile(model, modules=[name], out_splits=2)
    with pytest.raises(ConfigError, match="64 x 1 tiles are more than its 32 inputs"):
        tile(TinyGPT(), modules=["blocks.0.up"], in_splits=64)
    with pytest.raises(ConfigError, match="no linear layer of the model is called nowhere"):
        tile(TinyGPT(), modules=["nowhere"], out_splits=2)
    with pytest.raises(ConfigError, match="either above_numel, or in_splits and out_splits"):
        tile(TinyGPT())


@pytest.mark.parametrize("limit", [1, 3, 7, 16, 40, 1000])
def test_tiles_are_no_larger_than_asked(limit):
    model = nn.Sequential(nn.Linear(16, 9))
    tile(model, above_numel=limit)
    sizes = [t.weight.numel() for t in model[0].tiles] if isinstance(model[0], TiledLinear) else [16 * 9]
    assert sum(sizes) == 16 * 9
    assert max(sizes) <= max(limit, 1) or limit >= 16 * 9


def test_a_layer_of_its_own_has_the_values_distribution_of_a_plain_one():
    layer = TiledLinear(64, 40, in_splits=4, out_splits=4)
    bound = 1 / 8
    assert layer.weight.abs().max() <= bound and layer.bias.abs().max() <= bound
    assert layer.weight.abs().max() > 0.9 * bound
    with pytest.raises(ConfigError, match="in_splits=9"):
        TiledLinear(8, 8, in_splits=9)
    with pytest.raises(ConfigError, match="the input has 3 features"):
        layer(torch.ones(2, 3))


def test_regions_list_the_ranges_of_a_tile_in_its_weight():
    whole = torch.arange(7 * 5).view(7, 5)
    for (low, high), (left, right) in itertools.product([(0, 7), (2, 5)], [(0, 5), (1, 3)]):
        block = whole[low:high, left:right]
        region = Region("w", (7, 5), (low, left), tuple(block.shape))
        for start, stop in itertools.combinations(range(block.numel() + 1), 2):
            runs = list(region.runs(start, stop - start))
            got = torch.cat([whole.reshape(-1)[there : there + n] for _, there, n in runs])
            assert torch.equal(got, block.reshape(-1)[start:stop])
            assert [here for here, _, _ in runs] == [start + sum(n for _, _, n in runs[:i]) for i in range(len(runs))]


def test_outputs_are_the_parts_of_the_output():
    layer = TiledLinear(6, 5, in_splits=2, out_splits=3)
    x = torch.randn(4, 6)
    parts = layer.outputs(x)
    assert [part.shape[-1] for part in parts] == [1, 2, 2] and torch.equal(torch.cat(parts, dim=-1), layer(x))
