import json

import pytest

from trilithon.config import AdamW, Bf16, Constant, Cosine, Fp16, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam
from trilithon.errors import ConfigError
from trilithon.pretrain import PretrainConfig, load_pretrain, settings

DATA = {"data.paths": ["texts"]}


def test_what_is_left_open_gets_values_that_train_a_language_model():
    config = load_pretrain(overrides={**DATA, "run.steps": 400})
    engine = config.engine
    assert isinstance(engine.optimizer, AdamW) and engine.optimizer.betas == (0.9, 0.95)
    assert isinstance(engine.lr_schedule, Cosine)
    assert engine.lr_schedule.total_steps == 400 and engine.lr_schedule.warmup_steps == 20
    assert engine.clip_norm == 1.0 and engine.batch.micro_size == 8
    assert engine.precision.non_finite == "raise"
    assert engine.monitor.jsonl and engine.monitor.csv and engine.monitor.tensorboard


def test_tensorboard_is_off_by_default_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    assert not load_pretrain(overrides=DATA).engine.monitor.tensorboard
    assert load_pretrain(overrides={**DATA, "monitor.tensorboard": True}).engine.monitor.tensorboard


def test_sinks_that_are_all_written_stay_as_they_are():
    sinks = {"jsonl": False, "csv": False, "tensorboard": False, "every": 3}
    monitor = load_pretrain({"monitor": sinks}, DATA).engine.monitor
    assert {name: getattr(monitor, name) for name in sinks} == sinks


def test_restarts_need_checkpoints_to_restart_from():
    with pytest.raises(ConfigError, match=r"run\.max_restarts=2 without run\.save_every.*--save-every N"):
        load_pretrain(overrides={**DATA, "run.max_restarts": 2})
    assert load_pretrain(overrides={**DATA, "run.max_restarts": 2, "run.save_every": 50}).run.max_restarts == 2


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps(
            {
                "data": {"paths": ["here"], "held_out": 0.1},
                "model": {"preset": "nano"},
                "run": {"steps": 7},
                "zero": {"stage": 2},
                "optimizer": {"kind": "adamw", "lr": 0.5},
                "clip_norm": 0.25,
                "precision": {"kind": "fp32", "non_finite": "skip"},
                "monitor": {"csv": False},
            }
        )
    )
    config = load_pretrain(path, {"zero.stage": 3, "run.steps": 9, "optimizer.lr": 0.125})
    assert config.data.paths == ("here",) and config.data.held_out == 0.1
    assert config.model.preset == "nano" and config.run.steps == 9
    assert config.engine.zero.stage == 3 and config.engine.clip_norm == 0.25
    assert config.engine.optimizer == AdamW(lr=0.125)
    assert config.engine.precision.non_finite == "skip"
    assert not config.engine.monitor.csv and config.engine.monitor.jsonl


def test_toml_is_read_as_well(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('precision = "bf16"\n[data]\npaths = ["a"]\n[zero]\nstage = 1\n')
    config = load_pretrain(path)
    assert isinstance(config.engine.precision, Bf16) and config.engine.precision.non_finite == "raise"
    assert config.engine.zero.stage == 1 and config.data.paths == ("a",)


def test_a_deepspeed_file_gives_the_engines_part(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
                "zero_optimization": {"stage": 2},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            }
        )
    )
    config = load_pretrain(path, DATA)
    assert config.engine.zero.stage == 2 and config.engine.batch.micro_size == 4
    assert config.engine.batch.accumulation == 2
    assert isinstance(config.engine.optimizer, AdamW) and config.engine.optimizer.lr == 1e-4


def test_another_optimizer_or_schedule_does_not_inherit_foreign_settings():
    engine = load_pretrain(overrides={**DATA, "optimizer": "lamb", "optimizer.lr": 0.01}).engine
    assert isinstance(engine.optimizer, Lamb) and engine.optimizer.lr == 0.01
    engine = load_pretrain(overrides={**DATA, "lr_schedule": "constant", "lr_schedule.warmup_steps": 5}).engine
    assert engine.lr_schedule == Constant(warmup_steps=5)
    engine = load_pretrain(overrides={**DATA, "lr_schedule": "linear", "run.steps": 50}).engine
    assert engine.lr_schedule.kind == "linear" and engine.lr_schedule.total_steps == 50


def test_fp16_keeps_its_own_way_with_overflows():
    assert isinstance(load_pretrain(overrides={**DATA, "precision": "fp16"}).engine.precision, Fp16)


def test_a_global_batch_alone_is_taken_as_it_is():
    batch = load_pretrain(overrides={**DATA, "batch.global_size": 12}).engine.batch
    assert batch.resolve(2).micro_size == 6


def test_a_bpe_vocabulary_has_a_default_size():
    assert load_pretrain(overrides={**DATA, "data.tokenizer": "bpe"}).data.vocab_size == 4096


def test_the_whole_survives_the_way_to_another_process():
    config = load_pretrain(overrides={**DATA, "zero.stage": 3, "run.out": "x", "zero.bucket_numel": 1000})
    assert PretrainConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({}, "no data is given: pass --data"),
        ({**DATA, "model.width": 100, "model.num_heads": 3}, "nearest widths that do: 96 and 102"),
        ({**DATA, "model.preset": "huge"}, "nano, tiny, small"),
        ({**DATA, "model.widht": 100}, r"model\.widht: unknown key; did you mean width"),
        ({**DATA, "run.stepz": 1}, r"run\.stepz: unknown key"),
        ({**DATA, "run.steps": 0}, r"run\.steps"),
        ({**DATA, "run.steps": "many"}, r"run\.steps='many'"),
        ({**DATA, "zero.stag": 1}, r"zero\.stag: unknown key"),
        ({**DATA, "zero.stage": 4}, r"zero\.stage"),
        ({**DATA, "run": 5}, r"run is a block: set one of its keys, such as run\.steps"),
        ({**DATA, "lr_schedule.warmup_steps": 10_000}, "warmup_steps=10000 exceeds total_steps"),
    ],
)
def test_what_is_wrong_is_named_with_its_key(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_pretrain(overrides=overrides)


def test_all_that_is_wrong_comes_in_one_message_with_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[data]\npaths = ["x"]\ntokenizer = "words"\n[run]\nstepz = 1\n[zero]\nstge = 3\n')
    with pytest.raises(ConfigError) as caught:
        load_pretrain(path, {"model.width": "wide", "optimizer": "adamw", "precision": "fp8"})
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("5 problems")
    assert lines[0] == f"  - {path}: data.tokenizer='words' (text): must be 'bytes' or 'bpe'"
    assert lines[1].startswith("  - override: model.width='wide'")
    assert lines[2].startswith(f"  - {path}: run.stepz: unknown key; did you mean")
    assert {line.split(": ")[1].split()[0] for line in lines[3:]} == {"zero.stge", "precision.kind"}


def test_an_option_is_named_by_its_own_key():
    with pytest.raises(ConfigError, match=r"^override: optimizer\.lr=-1\.0 \(a number\): must be greater"):
        load_pretrain(overrides={**DATA, "optimizer.lr": -1.0})


def test_a_block_that_is_no_block_is_named():
    with pytest.raises(ConfigError, match="data: must be a block"):
        load_pretrain({"data": ["texts"]})


def test_compressed_rules_warm_up_for_a_fifth_of_the_run():
    engine = load_pretrain(overrides={**DATA, "optimizer": "onebit_adam", "optimizer.lr": 0.01, "run.steps": 50}).engine
    assert isinstance(engine.optimizer, OneBitAdam)
    assert (engine.optimizer.freeze_step, engine.optimizer.lr, engine.optimizer.betas) == (10, 0.01, (0.9, 0.95))
    engine = load_pretrain(overrides={**DATA, "optimizer": "zero_one_adam", "run.steps": 50}).engine
    assert isinstance(engine.optimizer, ZeroOneAdam) and engine.optimizer.var_freeze_step == 10
    engine = load_pretrain(overrides={**DATA, "optimizer": "onebit_lamb", "run.steps": 3}).engine
    assert isinstance(engine.optimizer, OneBitLamb) and engine.optimizer.freeze_step == 1
