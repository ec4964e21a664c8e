"""Config.load: what it reads, what it refuses, and that every value knows where it came from."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from trilithon.config import AdamW, Bf16, Config, Fp16, Sgd, ZeroConfig, examine, explain
from trilithon.errors import ConfigError


def problems_of(source, **kwargs):
    return [str(problem) for problem in examine(source, **kwargs).problems]


def origins_of(config):
    return {item.key: item for item in explain(config)}


def test_an_empty_configuration_is_all_defaults():
    config = Config.load({})
    assert config == Config()
    assert hash(config) == hash(Config())
    assert {item.kind for item in explain(config)} == {"default"}


def test_a_file_gives_the_same_as_its_dict(tmp_path):
    block = {"seed": 3, "zero": {"stage": 2}, "precision": "bf16", "optimizer": {"kind": "adamw", "lr": 0.5}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(block))
    for source in (file, str(file), block, json.dumps(block), Config.load(block)):
        assert Config.load(source) == Config.load(block)
    assert Config.load(block).optimizer == AdamW(lr=0.5)


def test_toml_is_read(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('seed = 3\nprecision = "fp16"\n[zero]\nstage = 2\nunit_classes = ["Block"]\n')
    config = Config.load(file)
    assert (config.seed, config.zero.stage, config.zero.unit_classes) == (3, 2, ("Block",))
    assert config.precision == Fp16()


def test_comments_and_trailing_commas_are_read_and_strings_stay_whole():
    config = Config.load(
        """{
        // a comment, with "quotes"
        "seed": 3,          # another
        /* and, a
           long one */
        "_mine": "http://x/*y*/ # [1,] ,}",
        "zero": {"stage": 2, "unit_classes": ["A", "B",],},
        }"""
    )
    assert (config.seed, config.zero.unit_classes) == (3, ("A", "B"))
    assert config.private == {"_mine": "http://x/*y*/ # [1,] ,}"}


def test_urlsafe_base64_of_json_is_read():
    text = json.dumps({"seed": 9, "_pad": "?>~" * 5})
    assert Config.load(base64.urlsafe_b64encode(text.encode()).decode()).seed == 9


def test_numbers_may_be_integral_floats_and_short_forms_name_a_kind():
    config = Config.load({"zero": {"stage": 3, "prefetch_numel": 5e7}, "precision": "bf16", "optimizer": "sgd"})
    assert config.zero.prefetch_numel == 50_000_000
    assert isinstance(config.zero.prefetch_numel, int)
    assert (config.precision, config.optimizer) == (Bf16(), Sgd())


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"seed": 1, "seed": 2}', "written twice in one block: seed"),
        ('{"zero": {"stage": 1, "stage": 2}}', "written twice in one block: stage"),
        ('{"seed": }', "line 1, column 10"),
        ('{\n"seed": 1\n"zero": 2}', "line 3, column 1"),
        ("[1, 2]", "neither JSON text nor base64"),
        ("// only a comment", "not valid JSON"),
        ('{"seed": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a":' * 100_000, "not valid JSON"),
        ("no/such/file.json", "no such file"),
        ("x" * 5000, "no such file"),
        ("a\0b", "no such file"),
    ],
)
def test_text_that_cannot_be_read_says_why(text, part):
    with pytest.raises(ConfigError) as caught:
        Config.load(text)
    assert part in str(caught.value)


def test_files_that_cannot_be_read_say_why(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(Path(tmp_path))
    cases = {
        "latin.json": (b'{"_name": "\xe9"}', "not UTF-8"),
        "list.json": (b"[1]", "a block"),
        "config.yaml": (b"seed: 1", "YAML is not read"),
        "config.toml": (b"seed = = 1", "not valid TOML"),
        "twice.toml": (b"seed = 1\nseed = 2", "not valid TOML"),
    }
    for name, (content, part) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            Config.load(tmp_path / name)
        assert part in str(caught.value)
        assert name in str(caught.value)


@pytest.mark.parametrize("source", [None, 3, [1], object()])
def test_a_source_of_another_type_is_refused(source):
    with pytest.raises(ConfigError, match="cannot be read from"):
        Config.load(source)


def test_a_dict_that_contains_itself_is_refused():
    block: dict = {"zero": {"stage": 1}}
    block["zero"]["unit_classes"] = block
    with pytest.raises(ConfigError, match="nested without end"):
        Config.load(block)


def test_all_problems_come_at_once_each_with_file_and_key(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(
        '{"seed": "7", "zero": {"stge": 2, "clip_norm": 1}, "clip_nrom": 1, "batch": 3, "precision": "bf61"}'
    )
    with pytest.raises(ConfigError) as caught:
        Config.load(file, overrides={"zero.stage": 9})
    lines = str(caught.value).splitlines()
    assert lines[0] == "7 problems in the configuration:"
    expected = [
        f"{file}: zero.stge: unknown key; did you mean zero.stage?",
        f"{file}: zero.clip_norm: unknown key; belongs at clip_norm",
        f"{file}: clip_nrom: unknown key; did you mean clip_norm?",
        f"{file}: precision.kind: 'bf61' is not a kind; did you mean bf16? one of fp32, bf16, fp16",
        f"{file}: seed='7' (text): must be a whole number",
        f"{file}: batch=3 (a whole number): must be a block of keys",
        "override: zero.stage=9 (a whole number): must be 0, 1, 2 or 3",
    ]
    assert sorted(line.removeprefix("  - ") for line in lines[1:]) == sorted(expected)


@pytest.mark.parametrize(
    ("block", "part"),
    [
        ({"stage": 1}, "stage: unknown key; belongs at zero.stage"),
        ({"zero": {"reduce_bucket_size": 1}}, "what DeepSpeed calls so is zero.bucket_numel here"),
        ({"lr": 1}, "lr: unknown key; belongs at optimizer.lr"),
        ({"optimizer": {"lr": 1}}, "optimizer.kind: missing; one of adam, adamw"),
        ({"optimizer": {"kind": "sgd", "betas": [0, 0]}}, "optimizer.betas: not a key of sgd; adam or adamw or lion"),
        ({"lr_schedule": {"kind": "linear"}}, "lr_schedule.total_steps: missing"),
        ({"precision": 16}, "precision=16 (a whole number): must be a block"),
        ({"monitor": None}, "monitor=None (null): must be a block"),
        ({"zero": {"stage": True}}, "zero.stage"),
        ({"zero": {"overlap": 1}}, "zero.overlap=1 (a whole number): must be true or false"),
        ({"zero": {"unit_classes": "Block"}}, "zero.unit_classes='Block' (text): must be a list"),
        ({"clip_norm": float("nan")}, "clip_norm=nan"),
        ({"clip_norm": 10**400}, "clip_norm="),
        ({"seed": 10**5000}, "seed=inf (a number): must be a whole number"),
        ({"seed": False}, "seed=False (true/false): must be a whole number"),
        ({"seed": -1}, "seed=-1 (a whole number): must be greater than or equal to 0"),
        ({"monitor": {"folder": 3}}, "monitor.folder=3 (a whole number): must be a path"),
        ({"comm": {"backend": 3}}, "comm.backend=3 (a whole number): must be text"),
        (
            {"optimizer": {"kind": "lion", "betas": [0, 0, 0]}},
            "optimizer.betas=[0, 0, 0] (a list): must hold at most 2",
        ),
        ({"lr_schedule": {"kind": "warmup_lr", "warmup_min_lr": []}}, "must hold at least 1 values"),
        ({7: 1}, "7: a key must be text, not a whole number"),
        ({"optimizer": {"kind": "adam", "betas": [0.9, 1.0]}}, "optimizer.betas.1=1.0"),
        ({"optimizer": {"kind": "sgd", "nesterov": True}}, "nesterov=true needs momentum > 0"),
        ({"optimizer": {"kind": "lamb", "min_ratio": 11}}, "min_ratio=11 exceeds max_ratio=10"),
        ({"precision": {"kind": "fp16", "initial_scale_power": 30}}, "2**30"),
        ({"lr_schedule": {"kind": "cosine", "total_steps": 5, "warmup_steps": 6}}, "warmup_steps=6 exceeds"),
        ({"lr_schedule": {"kind": "piecewise", "boundaries": [5], "factors": [1]}}, "need 2 factors, got 1"),
        ({"lr_schedule": {"kind": "piecewise", "boundaries": [5, 5], "factors": [1, 1, 1]}}, "must rise"),
    ],
)
def test_each_mistake_is_named_with_the_way_out(block, part):
    found = problems_of(block)
    assert any(part in problem for problem in found), found


def test_each_value_knows_its_origin(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"zero": {"stage": 2}, "precision": "bf16", "clip_norm": 1.0}')
    origins = origins_of(Config.load(file, overrides={"zero.stage": 3, "monitor": {"every": 5}}))
    assert (origins["zero.stage"].value, origins["zero.stage"].kind) == (3, "override")
    assert (origins["monitor.every"].value, origins["monitor.every"].kind) == (5, "override")
    assert str(origins["precision.kind"].source) == f"{file}:precision"
    assert str(origins["clip_norm"].source) == f"{file}:clip_norm"
    assert (origins["clip_norm"].kind, origins["zero.overlap"].kind) == ("file", "default")
    assert origins_of(Config(clip_norm=2.0))["clip_norm"].kind == "argument"


def test_origins_survive_loading_a_config_again_with_overrides(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"zero": {"stage": 2}, "_mine": 1}')
    again = Config.load(Config.load(file), overrides={"seed": 4})
    assert str(origins_of(again)["zero.stage"].source) == f"{file}:zero.stage"
    assert origins_of(again)["seed"].kind == "override"
    assert again.private == {"_mine": 1}


def test_an_override_with_a_kind_replaces_the_block_and_one_without_changes_it():
    block = {"optimizer": {"kind": "adamw", "lr": 0.5, "betas": [0.8, 0.9]}, "precision": "fp16"}
    assert Config.load(block, overrides={"optimizer": {"kind": "sgd", "lr": 1}}).optimizer == Sgd(lr=1)
    assert Config.load(block, overrides={"optimizer.lr": 1}).optimizer == AdamW(lr=1, betas=(0.8, 0.9))
    assert Config.load(block, overrides={"precision.window": 7}).precision == Fp16(window=7)
    assert Config.load(block, overrides={"optimizer": None, "precision": "fp32"}).optimizer is None


def test_the_source_dict_is_left_as_it_was():
    block = {"zero": {"stage": 1}, "precision": "fp16"}
    Config.load(block, overrides={"zero.stage": 2, "precision.window": 3})
    assert block == {"zero": {"stage": 1}, "precision": "fp16"}


def test_sections_may_be_given_as_objects():
    assert Config.load({"zero": ZeroConfig(stage=2), "precision": Bf16()}) == Config(
        zero=ZeroConfig(stage=2), precision=Bf16()
    )


def test_values_without_effect_are_noted():
    def noted(block):
        return " | ".join(Config.load(block).notes)

    assert "zero.prefetch_numel: no effect, because zero.stage is 2" in noted(
        {"zero": {"stage": 2, "prefetch_numel": 1}}
    )
    assert noted({"zero": {"stage": 3, "prefetch_numel": 1}}) == ""
    assert "monitor.csv: no effect" in noted({"monitor": {"csv": True}})
    assert noted({"monitor": {"csv": True, "folder": "runs"}}) == ""
    fixed = {"kind": "fp16", "loss_scale": 8, "window": 10}
    assert "precision.window: no effect, because precision.loss_scale=8" in noted({"precision": fixed})
    assert "zero.persist_total_numel: no effect" in noted({"zero": {"stage": 3, "persist_total_numel": 5}})


def test_expected_values_that_differ_are_problems_in_the_native_format_too():
    found = problems_of({"batch": {"micro_size": 2}, "clip_norm": 1}, expected={"batch.micro_size": 4, "clip_norm": 1})
    assert found == ["config: batch.micro_size=2, but the caller's arguments say 4; change one"]


def test_integers_of_other_libraries_are_whole_numbers():
    numpy = pytest.importorskip("numpy")
    config = Config.load({"seed": numpy.int64(7), "clip_norm": numpy.float32(0.5)})
    assert (type(config.seed), config.seed, config.clip_norm) == (int, 7, 0.5)
    with pytest.raises(ConfigError, match="seed="):
        Config.load({"seed": numpy.bool_(True)})


def test_building_by_hand_raises_the_same_exception():
    with pytest.raises(ConfigError, match=r"ZeroConfig: stage=9 .* x: unknown key"):
        ZeroConfig(stage=9, x=1)
    with pytest.raises(ConfigError, match="clip_norm="):
        Config(clip_norm="a")


def test_configurations_are_frozen_and_can_be_sent_to_other_processes():
    config = Config.load({"zero": {"stage": 2}, "_mine": 3, "$schema": "s.json"}, overrides={"seed": 1})
    assert config.private == {"_mine": 3, "$schema": "s.json"}
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 2
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert explain(again) == explain(config)
    assert Config.load(config.model_dump(mode="json")) == config


def test_comm_and_parameter_types_combine_freely():
    for kind in ("fp32", "bf16", "fp16"):
        for comm in ("fp32", "bf16", "fp16", None):
            config = Config.load({"precision": kind, "zero": {"comm_dtype": comm}})
            assert (config.precision.kind, config.zero.comm_dtype) == (kind, comm)


def test_configuration_is_read_without_torch_and_numpy():
    code = (
        "import sys; from trilithon.config import Config; Config.load({'zero_optimization': {'stage': 1}, "
        "'train_batch_size': 4}); assert not {'torch', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
