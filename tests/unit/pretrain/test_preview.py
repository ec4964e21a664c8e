from typing import get_args

import pytest
import torch

import trilithon
from trilithon.config import OptimizerConfig
from trilithon.errors import ConfigError
from trilithon.models import GPT
from trilithon.pretrain import load_pretrain
from trilithon.pretrain.preview import checkpoint_bytes, held_bytes, mesh_bytes, preview


def config(**changes):
    return load_pretrain(overrides={"data.paths": ["x"], "model.preset": "nano", "run.steps": 10} | changes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd"])
def test_the_bytes_are_those_of_a_run(precision, optimizer):
    settings = config(precision=precision, optimizer=optimizer, **{"optimizer.lr": 1e-3, "zero.stage": 1})
    shape = settings.model.shape(257)
    told = held_bytes(settings, shape.num_parameters(), 1)
    with trilithon.initialize(GPT(shape), {**settings.engine.model_dump(), "monitor": {}}) as engine:
        tokens = torch.zeros(1, 8, dtype=torch.long)
        engine.backward(engine(tokens, tokens))
        measured = engine.memory()
        engine.step()
        measured["optimizer"] = engine.memory()["optimizer"]
    for name, size in told.items():
        assert measured.get(name, 0) == pytest.approx(size, rel=0.01), name  # up to the padding of units


def test_stages_cut_what_they_promise():
    by_stage = [held_bytes(config(**{"zero.stage": stage, "precision": "bf16"}), 1000, 4) for stage in range(4)]
    assert [sum(held.values()) for held in by_stage] == [16000, 7000, 5500, 4000]
    assert checkpoint_bytes(config(precision="bf16"), 1000) == 12000


def test_settings_sizes_and_bytes_are_shown():
    text = preview(config(**{"zero.stage": 2, "batch.micro_size": 4}), 2)
    assert "zero.stage = 2" in text and "run.steps = 10" in text and "optimizer.lr = 0.003" in text
    assert "a step: 8 sequences of 64 tokens: 1 micro-batches of 4 on each of 2 ranks" in text
    assert "steps: 10, 5,120 tokens" in text
    with pytest.raises(ConfigError, match=r"9 .* do not go together on 2"):
        preview(config(**{"batch.global_size": 9}), 2)


KINDS = [rule.model_fields["kind"].default for rule in get_args(get_args(OptimizerConfig)[0])]
COMPRESSED = ["onebit_adam", "onebit_lamb", "zero_one_adam", "apmsqueeze"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_update_rule_has_a_preview(kind):
    text = preview(config(optimizer=kind), 2)
    assert f"optimizer.kind = '{kind}'" in text
    assert ("in the compressed phase" in text) == (kind in COMPRESSED)


@pytest.mark.parametrize(
    ("kind", "stage", "whole", "own"),  # fp32 numbers a parameter: on every rank, and cut over them at stage 1
    [("onebit_adam", 0, 4, 0), ("onebit_adam", 1, 2, 2), ("apmsqueeze", 1, 2, 2), ("onebit_lamb", 0, 5, 0),
     ("onebit_lamb", 1, 2, 3), ("zero_one_adam", 0, 5, 0)],
)  # fmt: skip
def test_compressed_rules_hold_a_vector_and_two_residuals(kind, stage, whole, own):
    settings = config(optimizer=kind, **{"zero.stage": stage})
    server = 1600 // 4
    assert held_bytes(settings, 1600, 4)["optimizer"] == 4 * (whole * 1600 + own * 400 + server)
    saved = 3 + (kind == "onebit_lamb")  # with the weights
    assert checkpoint_bytes(settings, 1600, 4) == 4 * (saved * 1600 + 4 * 1600 + 1600)
    alone = held_bytes(settings, 1600, 1)["optimizer"]  # nothing is lost, so nothing is kept
    assert alone == 4 * 1600 * (whole + own - 1)
    assert held_bytes(config(optimizer=kind, **{"run.steps": 1}), 1600, 4)["optimizer"] == 4 * 2 * 1600


@pytest.mark.parametrize("kind", COMPRESSED)
def test_the_bytes_of_compressed_rules_are_those_of_a_run(kind):
    settings = config(optimizer=kind, **{"run.steps": 2})
    shape = settings.model.shape(257)
    with trilithon.initialize(GPT(shape), {**settings.engine.model_dump(), "monitor": {}}) as engine:
        tokens = torch.arange(8).view(1, 8)
        for _ in range(2):
            engine.backward(engine(tokens, tokens))
            engine.step()
        assert engine.memory()["optimizer"] == held_bytes(settings, shape.num_parameters(), 1)["optimizer"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "zero_one_adam", "zero.stage": 1}, "use zero.stage=0"),
        ({"optimizer": "onebit_adam", "zero.stage": 3}, "use zero.stage 0 or 1"),
        ({"offload.state": "host"}, "set zero.stage to 1, 2 or 3"),
        ({"optimizer": "onebit_adam", "mesh.tensor": 2}, "mesh.tensor=2 gives ranks parts"),
        ({"optimizer": "onebit_adam", "model.experts": 4}, "Use ep_size=1"),
        ({"mesh.pipe": 2, "zero.stage": 3}, "Use zero.stage 0, 1 or 2 inside the stages"),
        ({"mesh.tensor": 2, "tensor.cut_norms": True, "recompute.partition": True}, "Leave recompute.partition out"),
        ({"mesh.tensor": 2, "model.num_heads": 1}, "num_heads=1 does not split over mesh.tensor=2 x mesh.sequence=1"),
    ],
)
def test_what_the_engine_refuses_is_refused_first(changes, words):
    with pytest.raises(ConfigError, match=words):
        preview(config(**changes), 2)


def test_cut_norms_are_refused_with_stages():
    with pytest.raises(ConfigError, match="only the first stage has one"):
        preview(config(**{"mesh.pipe": 2, "mesh.tensor": 2, "tensor.cut_norms": True}), 4)


@pytest.mark.parametrize(
    ("changes", "ranks", "cut_by"),  # the mesh, and over how many ranks (matrices, norms) are cut at stage 3
    [
        ({}, 4, (4, 4)),
        ({"mesh.tensor": 2}, 4, (4, 2)),
        ({"mesh.sequence": 2}, 4, (4, 4)),
        ({"mesh.tensor": 4, "model.num_heads": 4}, 8, (8, 2)),
        ({"mesh.tensor": 2, "tensor.cut_norms": True}, 4, (4, 4)),
    ],
)
def test_each_part_is_cut_over_the_ranks_that_hold_it(changes, ranks, cut_by):
    settings = config(**changes, **{"zero.stage": 3})
    shape = settings.model.shape(256)
    norms = 5 * shape.width
    matrices = shape.num_parameters() - norms
    held = mesh_bytes(settings, shape, ranks)
    exact = matrices / cut_by[0] + norms / cut_by[1]
    assert held["parameters"] == held["gradients"] == pytest.approx(4 * exact, abs=8)
    assert held["optimizer"] == 2 * held["parameters"]
    whole = mesh_bytes(config(**changes), shape, ranks)  # at stage 0 only tensor ranks divide
    tensor = changes.get("mesh.tensor", 1)
    assert whole["parameters"] == pytest.approx(4 * (matrices / tensor + norms), abs=8)


def test_experts_are_spread_and_the_rest_is_not():
    settings = config(**{"model.experts": 4, "model.ep_size": 2, "mesh.tensor": 2})
    shape = settings.model.shape(256)
    width, mlp = shape.width, 2 * shape.width * shape.inner_width
    experts, rest = 4 * mlp, 4 * width + 5 * width  # of one of two layers; router and norms
    matrices = shape.num_parameters() - experts - rest
    assert mesh_bytes(settings, shape, 4)["parameters"] == 4 * (matrices // 2 + rest + experts // 2)


def test_the_stage_that_holds_most_is_told():
    settings = config(**{"mesh.pipe": 2, "zero.stage": 1, "model.num_layers": 4})
    shape = settings.model.shape(64)
    width, vocabulary = shape.width, 64 * shape.width
    block = 12 * width**2 + 2 * width
    held = mesh_bytes(settings, shape, 4)
    assert held["parameters"] == 4 * (vocabulary + 2 * block + width)  # the last stage has the last norm
    assert held["optimizer"] == 8 * (vocabulary // 4 + (2 * block + width) // 2)  # the tied matrix is on four ranks


def test_the_batch_is_split_over_the_data_axis():
    assert "on each of 2 ranks" in preview(config(**{"mesh.tensor": 2, "batch.global_size": 8}), 4)
