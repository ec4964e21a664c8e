"""C052: misspelt or misplaced keys in nested blocks are errors with the right place; idle blocks are noted."""

from __future__ import annotations

import pytest

from trilithon.config import Config, explain
from trilithon.errors import ConfigError

BATCH = {"train_batch_size": 8}


@pytest.mark.parametrize(
    ("block", "part"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation: unknown key; did you mean zero_optimization?"),
        (
            {"zero_optimization": {"stge": 2}},
            "zero_optimization.stge: unknown key; did you mean zero_optimization.stage?",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memry": True}}},
            "zero_optimization.offload_optimizer.pin_memry: unknown key; did you mean "
            "zero_optimization.offload_optimizer.pin_memory?",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"weight_dcay": 0}}},
            "optimizer.params.weight_dcay: unknown key; did you mean optimizer.params.weight_decay?",
        ),
        (
            {"timers": {"throughput": {"enabld": True}}},
            "timers.throughput.enabld: unknown key; did you mean timers.throughput.enabled?",
        ),
    ],
)
def test_a_misspelt_key_at_each_depth_is_refused_with_the_right_one(block, part):
    with pytest.raises(ConfigError) as caught:
        Config.load({**BATCH, **block})
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("block", "part"),
    [
        (
            {**BATCH, "zero_optimization": {"gradient_clipping": 1}},
            "zero_optimization.gradient_clipping: unknown key; belongs at gradient_clipping",
        ),
        (
            {**BATCH, "overlap_comm": True},
            "overlap_comm: unknown key; belongs at zero_optimization.overlap_comm",
        ),
        (
            {**BATCH, "bf16": {"enabled": True, "loss_scale_window": 5}},
            "bf16.loss_scale_window: unknown key; belongs at fp16.loss_scale_window",
        ),
        ({"zero": {"clip_norm": 1}}, "zero.clip_norm: unknown key; belongs at clip_norm"),
        ({"monitor": {"micro_size": 1}}, "monitor.micro_size: unknown key; belongs at batch.micro_size"),
    ],
)
def test_a_valid_key_in_the_wrong_block_is_refused_with_its_place(block, part):
    with pytest.raises(ConfigError) as caught:
        Config.load(block)
    assert part in str(caught.value)


def test_a_block_for_a_feature_that_is_off_is_noted():
    config = Config.load({**BATCH, "fp16": {"enabled": False, "loss_scale": 128}})
    assert config.precision.kind == "fp32"
    assert "fp16.loss_scale: no effect, because fp16.enabled is not true" in config.notes
    config = Config.load({"zero": {"stage": 1, "persist_below_numel": 100}})
    assert any(note.startswith("zero.persist_below_numel: no effect, because zero.stage is 1") for note in config.notes)


def test_effective_settings_list_the_origin_of_each_value():
    config = Config.load({**BATCH, "zero_optimization": {"stage": 2}}, overrides={"seed": 5}, deepspeed_release="0.19")
    origins = {item.key: (item.value, item.kind, str(item.source)) for item in explain(config)}
    assert origins["zero.stage"] == (2, "deepspeed", "config:zero_optimization.stage")
    assert origins["seed"] == (5, "override", "override")
    assert origins["zero.overlap"] == (True, "default", "default")
    assert origins["clip_norm"][:2] == (1.0, "derived")
    assert set(origins) >= {"batch.global_size", "precision.kind", "comm.timeout_s", "optimizer", "monitor.every"}
