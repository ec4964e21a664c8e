"""One product per expert into one buffer computes, forward and backward, what each expert does by itself."""

import pytest
import torch
from torch import nn

from trilithon.parallel.moe import products
from trilithon.parallel.moe.experts import Experts
from trilithon.parallel.moe.forms import ACTIVATIONS, Form

M, F = 5, 7
COUNTS = [4, 0, 3]


def weights_of(gated, bias):
    torch.manual_seed(1)
    shapes = {"up": (F, M), "down": (M, F), **({"gate": (F, M)} if gated else {})}
    found = {}
    for name, shape in shapes.items():
        found[f"{name}.weight"] = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
        if bias:
            found[f"{name}.bias"] = torch.randn(3, shape[0], dtype=torch.float64, requires_grad=True)
    return found


def one_by_one(x, form, weights):
    parts = []
    for index, rows in enumerate(x.split(COUNTS)):
        parts.append(form.run(rows, {name: value[index] for name, value in weights.items()}))
    return torch.cat(parts)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_those_of_autograd(activation, gated, bias):
    form, weights = Form(activation, "up", "down", "gate" if gated else None), weights_of(gated, bias)
    x = torch.randn(sum(COUNTS), M, dtype=torch.float64, requires_grad=True)
    expected, found = one_by_one(x, form, weights), products.run(x, COUNTS, form, weights)
    assert torch.allclose(found, expected, rtol=0, atol=1e-13)
    pull = torch.randn_like(x)
    inputs = [x, *weights.values()]
    theirs = torch.autograd.grad(expected, inputs, pull)
    ours = torch.autograd.grad(found, inputs, pull)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert not ours[1][1].any()  # no row, no gradient, but a gradient of zeros


@pytest.mark.parametrize("frozen", ["up.weight", "down.weight", "down.bias", "everything"])
def test_frozen_weights_get_none_and_the_rest_is_as_before(frozen):
    form, weights = Form("silu", "up", "down", "gate"), weights_of(True, True)
    for name, value in weights.items():
        value.requires_grad_(frozen not in (name, "everything"))
    x = torch.randn(sum(COUNTS), M, dtype=torch.float64, requires_grad=True)
    products.run(x, COUNTS, form, weights).square().sum().backward()
    found, x.grad = x.grad, None
    grads = {name: value.grad for name, value in weights.items()}
    for value in weights.values():
        value.grad = None
    one_by_one(x, form, weights).square().sum().backward()
    assert torch.allclose(found, x.grad, rtol=0, atol=1e-12)
    for name, value in weights.items():
        assert (grads[name] is None) == (value.grad is None) == (frozen in (name, "everything")), name


def test_under_autocast_experts_compute_in_the_type_that_it_asks_for():
    torch.manual_seed(0)
    experts = Experts(nn.Sequential(nn.Linear(M, F), nn.GELU(), nn.Linear(F, M)), 3)
    x = torch.randn(sum(COUNTS), M)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = experts(x, COUNTS)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), experts(x, COUNTS), rtol=0.05, atol=0.05)
