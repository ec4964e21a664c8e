"""The models for tests: deterministic, and with the special cases they promise."""

from __future__ import annotations

import pytest
import torch

from trilithon.testing.models import MLP, SharedLayerNet, TinyGPT
from trilithon.testing.parity import token_batches, vector_batches


@pytest.mark.parametrize("model_class", [TinyGPT, MLP, SharedLayerNet])
def test_weights_come_from_the_seed_and_leave_the_global_generator_alone(model_class):
    before = torch.random.get_rng_state()
    first = model_class(seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    again, other = model_class(seed=3), model_class(seed=4)
    names = dict(first.named_parameters())
    assert all(torch.equal(p, names[name]) for name, p in again.named_parameters())
    assert any(not torch.equal(p, names[name]) for name, p in other.named_parameters())


def test_a_tied_head_is_one_parameter_and_an_untied_one_is_two():
    tied, untied = TinyGPT(tied=True), TinyGPT(tied=False)
    assert tied.head.weight is tied.tokens.weight
    assert untied.head.weight is not untied.tokens.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_gradients_reach_everything_but_what_is_frozen_or_unused():
    model = TinyGPT(frozen=True, unused=True)
    model(token_batches(1, 4)[0][0][0]).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    frozen = {name for name, p in model.named_parameters() if name.startswith(("positions.", "blocks.0."))}
    assert without == frozen | {"unused.weight", "unused.bias"}
    assert all(model.get_parameter(name).requires_grad != (name in frozen) for name in without)


def test_a_token_is_predicted_from_those_before_it_only():
    model = TinyGPT()
    tokens = token_batches(1, 2, length=12)[0][0][0]
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % model.vocab
    same = torch.isclose(model.logits(tokens), model.logits(changed), atol=1e-6).all(dim=(0, 2))
    assert same.tolist() == [True] * 6 + [False] * 6


def test_a_new_model_is_as_unsure_as_chance():
    # logits have size about 1, which costs at most about 1 nat over the uniform guess
    loss = TinyGPT()(token_batches(1, 64)[0][0][0]).item()
    chance = torch.tensor(61.0).log().item()
    assert chance - 0.5 < loss < chance + 1.5


def test_the_shared_layer_adds_up_its_three_uses_and_the_spare_one_gets_nothing():
    model = SharedLayerNet()
    (x, target) = vector_batches(1, 4)[0][0]
    model(x, target).backward()
    assert model.same is model.shared
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["never.weight", "never.bias"]
    delta = torch.zeros_like(model.shared.weight)
    delta[0, 0] = 1e-2
    with torch.no_grad():
        losses = []
        for sign in (1, -1):
            model.shared.weight += sign * delta
            losses.append(model(x, target).double())
            model.shared.weight -= sign * delta
    slope = (losses[0] - losses[1]) / 2e-2  # central difference: error of the order of 1e-4
    assert slope.item() == pytest.approx(model.shared.weight.grad[0, 0].item(), abs=1e-3)


@pytest.mark.parametrize("model_class", [MLP, SharedLayerNet])
def test_the_loss_is_the_mean_squared_error_in_fp32_also_for_low_precision(model_class):
    model = model_class().to(torch.bfloat16)
    x, target = (tensor.to(torch.bfloat16) for tensor in vector_batches(1, 4)[0][0])
    loss = model(x, target)
    assert loss.dtype is torch.float32
    assert torch.equal(loss, (model(x).float() - target.float()).square().mean())
