"""The tolerances: correct runs that round differently pass, and the usual mistakes do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trilithon.testing import parity
from trilithon.testing.models import MLP, TinyGPT
from trilithon.testing.parity import assert_same_training, token_batches, tolerance, train_plain, vector_batches

STEPS = 5
OPTIONS = {"adamw": {"weight_decay": 0.1}, "sgd": {"lr": 0.1, "momentum": 0.9}, "lion": {"lr": 1e-4}, "lamb": {}}
SCALE = {"fp32": 1.0, "bf16": 1.0, "fp16": 128.0}


def train(optimizer="adamw", precision="fp32", world_size=4, batches=None, **extra):
    options = {"optimizer": optimizer, "precision": precision, "loss_scale": SCALE[precision], **OPTIONS[optimizer]}
    return train_plain(TinyGPT, batches or token_batches(STEPS, 8, 2), world_size=world_size, **{**options, **extra})


def check(reference, run, precision="fp32", optimizer="adamw"):
    limits = tolerance(precision, STEPS, optimizer=optimizer)
    assert_same_training(reference, run.losses, run.parameters, limits, run.grad_norms)


@pytest.mark.parametrize("optimizer", list(OPTIONS))
def test_another_cut_of_the_batch_passes_in_fp32(optimizer):
    check(train(optimizer, world_size=4), train(optimizer, world_size=1), optimizer=optimizer)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion"])
def test_averaged_gradients_rounded_to_the_low_type_pass(optimizer, precision, monkeypatch):
    reference = train(optimizer, precision)
    exact = parity._mean_gradients

    def rounded(model, parts, dtype, loss_scale):
        loss, gradients = exact(model, parts, dtype, loss_scale)
        return loss, {name: (grad * loss_scale).to(dtype).float() / loss_scale for name, grad in gradients.items()}

    monkeypatch.setattr(parity, "_mean_gradients", rounded)
    run = train(optimizer, precision)
    assert run.grad_norms != reference.grad_norms  # the rounding did happen
    check(reference, run, precision, optimizer)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "mistake",
    [
        {"lr": 1.1e-3},
        {"betas": (0.0, 0.999)},
        {"clip_norm": 0.3, "optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
        {"batches": [step[:1] for step in token_batches(STEPS, 8, 2)]},
        {"batches": [[(tokens[:4],) for (tokens,) in step] for step in token_batches(STEPS, 8, 2)]},
    ],
    ids=["rate", "moments", "clipping", "micro-step dropped", "ranks dropped"],
)
def test_mistakes_are_found(mistake, precision):
    optimizer = mistake.get("optimizer", "adamw")
    with pytest.raises(AssertionError, match="differs from the reference"):
        check(train(optimizer, precision), train(precision=precision, **mistake), precision, optimizer)


@pytest.mark.parametrize("optimizer", list(OPTIONS))
def test_one_wrong_element_is_found_in_fp32(optimizer):
    reference = train(optimizer)
    parameters = {name: value.clone() for name, value in reference.parameters.items()}
    flat = parameters["blocks.1.up.weight"].view(-1)
    start = reference.start["blocks.1.up.weight"].view(-1)
    flat[100] = start[100]  # the element at the edge of a shard that nobody updated
    with pytest.raises(AssertionError, match=r"blocks\.1\.up\.weight ends"):
        check(reference, replace(reference, parameters=parameters), optimizer=optimizer)


def test_what_should_not_move_has_to_be_equal_bit_for_bit():
    reference = train_plain(lambda: TinyGPT(frozen=True), token_batches(STEPS, 8))
    check(reference, reference)
    parameters = dict(reference.parameters)
    parameters["positions.weight"] = parameters["positions.weight"] * (1 + 2.0**-22)
    with pytest.raises(AssertionError, match=r"positions\.weight"):
        check(reference, replace(reference, parameters=parameters))


def test_nan_names_shapes_and_lengths_are_found():
    reference = train_plain(MLP, vector_batches(STEPS, 4))
    limits = tolerance("bf16", STEPS)
    with pytest.raises(AssertionError, match="loss of step 2: nan"):
        losses = [reference.losses[0], float("nan"), *reference.losses[2:]]
        assert_same_training(reference, losses, reference.parameters, limits)
    with pytest.raises(AssertionError, match="4 values of loss instead of 5"):
        assert_same_training(reference, reference.losses[1:], reference.parameters, limits)
    with pytest.raises(AssertionError, match=r"missing \['last.bias'\], unexpected \['last.extra'\]"):
        renamed = {("last.extra" if name == "last.bias" else name): p for name, p in reference.parameters.items()}
        assert_same_training(reference, reference.losses, renamed, limits)
    with pytest.raises(AssertionError, match=r"last\.bias has shape"):
        cut = {**reference.parameters, "last.bias": reference.parameters["last.bias"][:2]}
        assert_same_training(reference, reference.losses, cut, limits)
    with pytest.raises(AssertionError, match=r"last\.bias ends nan"):
        spoilt = {**reference.parameters, "last.bias": torch.full((4,), float("nan"))}
        assert_same_training(reference, reference.losses, spoilt, limits)
