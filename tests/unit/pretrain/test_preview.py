import pytest
import torch

import trilithon
from trilithon.errors import ConfigError
from trilithon.models import GPT
from trilithon.pretrain import load_pretrain
from trilithon.pretrain.preview import checkpoint_bytes, held_bytes, preview


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
