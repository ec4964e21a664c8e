"""A DeepSpeed file becomes a native one that says the same, with one note for each of its keys."""

from __future__ import annotations

import json
import tomllib

import pytest

from trilithon.config import Config
from trilithon.config.migration import as_json, as_text, as_toml, migrate
from trilithon.config.origin import leaves
from trilithon.errors import ConfigError

RICH = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "_mine": {"note": 1},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "min_loss_scale": 1},
    "bf16": {"enabled": False},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "zero_quantized_weights": False,
        "offload_optimizer": {"device": "nvme", "nvme_path": '/mnt/a "b"'},
        "leaf_module": {"classes": ["Block", "Head"]},
    },
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "adam_w_mode": False}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 1e-6], "warmup_num_steps": 10}},
    "wandb": {"enabled": False, "group": "x"},
    "csv_monitor": {"enabled": True, "output_path": "out", "job_name": "run"},
    "steps_per_print": None,
    "zero_optimization.reduce_bucket_size": 7.5,
    "wall_clock_breakdown": False,
    "pipeline": {},
}
FILES = [
    RICH,
    {"train_micro_batch_size_per_gpu": 1},
    {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Lion"},
    },
    {"train_batch_size": 1, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}}},
    {"train_batch_size": 1, "optimizer": {"type": "OneBitLamb", "params": {"freeze_step": 5}}},
    {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "fp16": {"enabled": True},
    },
]


@pytest.mark.parametrize("release", ["0.19", "0.16"])
@pytest.mark.parametrize("file", FILES)
def test_both_forms_say_what_the_file_says(file, release):
    original = Config.load(file, deepspeed_release=release)
    found = migrate(file, deepspeed_release=release)
    assert found.config == original and not found.of("refused")
    assert Config.load(tomllib.loads(as_toml(found))) == original
    assert Config.load(json.loads(as_json(found))) == original


def test_every_key_of_the_file_has_exactly_one_note():
    found = migrate(RICH)
    keys = [note.key for note in found.notes]
    assert len(set(keys)) == len(keys)
    for key, _ in leaves(RICH):
        covering = [note for note in found.notes if key == note.key or key.startswith(f"{note.key}.")]
        assert len(covering) >= 1, key


@pytest.mark.parametrize(
    ("key", "fate", "text"),
    [
        ("train_batch_size", "mapped", "batch.global_size = 32"),
        ("zero_optimization.offload_optimizer.device", "mapped", 'offload.state = "disk"'),
        ("optimizer.type", "mapped", 'optimizer.kind = "adam"'),
        ("steps_per_print", "mapped", "monitor.quiet = true"),
        ("zero_optimization.zero_quantized_weights", "same", "is how it is here in any case"),
        ("zero_optimization.contiguous_gradients", "ignored", "always lie in one flat buffer"),
        ("zero_optimization.reduce_bucket_size", "mapped", "zero.bucket_numel = 500000000"),
        ("bf16.enabled", "ignored", "it is off"),
        ("wandb", "ignored", "it is off"),
        ("_mine.note", "ignored", "a key of your own"),
        ("csv_monitor.job_name", "ignored", "with output_path, sets `monitor.folder`"),
        ("pipeline", "ignored", "an empty block"),
    ],
)
def test_what_a_note_says(key, fate, text):
    (note,) = [note for note in migrate(RICH).notes if note.key == key][:1]
    assert (note.fate, text in note.text) == (fate, True), note


def test_what_is_refused_is_named_and_the_rest_is_there():
    found = migrate(
        {**RICH, "zero_optimization": {"stage": 2, "zero_quantized_weights": True}, "amp": {"enabled": True}}
    )
    assert found.config is None
    assert [note.key for note in found.of("refused")] == ["zero_optimization.zero_quantized_weights", "amp"]
    assert tomllib.loads(as_toml(found))["zero"] == {"stage": 2}
    assert "#   amp: Apex AMP is not in this version; set" in as_toml(found)
    assert "Refused:\n  zero_optimization.zero_quantized_weights: True: quantised" in as_text(found)


def test_values_that_nothing_supplies_are_refused_and_supplied_ones_mapped():
    file = {"train_micro_batch_size_per_gpu": "auto"}
    (note,) = migrate(file).of("refused")
    assert note.key == "train_micro_batch_size_per_gpu" and "trilithon check --auto" in note.text
    found = migrate(file, auto={"train_micro_batch_size_per_gpu": 4})
    assert tomllib.loads(as_toml(found))["batch"] == {"micro_size": 4} and not found.of("refused")


def test_a_clip_norm_that_nothing_supplies_is_not_told_as_absent():
    text = as_toml(migrate({"train_batch_size": 8, "gradient_clipping": "auto"}))
    assert "clip_norm" not in text and "absent" not in text and "gradient_clipping" in text


def test_a_native_file_is_not_migrated():
    with pytest.raises(ConfigError, match="configuration of trilithon already"):
        migrate({"zero": {"stage": 2}})
