"""`trilithon migrate`: text on stdout that loads, notes, and an exit status that says whether all of it has a place."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from trilithon.cli import main as command_line
from trilithon.config import Config

FILE = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": True}, "wandb": {"enabled": False}}


@pytest.fixture
def run(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            command_line.main(["migrate", *map(str, arguments)])
        out, err = capsys.readouterr()
        return SimpleNamespace(exit_code=caught.value.code, stdout=out, stderr=err)

    return call


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(FILE))
    return path


def test_toml_on_stdout_is_the_same_configuration(run, file, tmp_path):
    done = run(file)
    assert done.exit_code == 0
    (tmp_path / "config.toml").write_text(done.stdout)
    assert Config.load(tmp_path / "config.toml") == Config.load(file)
    assert "stage = 2  # zero_optimization.stage" in done.stdout and "#   wandb: it is off" in done.stdout


def test_json_is_bare_and_the_notes_are_beside_it(run, file, tmp_path):
    done = run(file, "--format", "json", "--out", tmp_path / "config.json")
    assert done.exit_code == 0 and json.loads((tmp_path / "config.json").read_text())["zero"]["stage"] == 2
    assert "train_batch_size: batch.global_size = 8" in done.stderr and "written:" in done.stdout
    assert Config.load(tmp_path / "config.json") == Config.load(file)


def test_refused_keys_end_with_1_and_the_way_out(run, file):
    file.write_text(json.dumps({**FILE, "amp": {"enabled": False}}))
    done = run(file)
    assert done.exit_code == 1 and "1 key refused: amp" in done.stderr
    assert 'deepspeed_release="0.16"' in done.stdout
    older = run(file, "--deepspeed-release", "0.16")
    assert older.exit_code == 0 and "by the rules of DeepSpeed 0.16" in older.stdout


def test_what_initialize_refuses_together_is_refused_here_too(run, file):
    file.write_text(json.dumps({**FILE, "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 5}}}))
    done = run(file)
    assert done.exit_code == 1 and "refused" in done.stderr and "zero.stage" in done.stdout


def test_values_for_auto(run, file):
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto"}))
    assert run(file).exit_code == 1
    done = run(file, "--auto", "train_micro_batch_size_per_gpu=4")
    assert done.exit_code == 0 and "micro_size = 4" in done.stdout


def test_wrong_usage_ends_with_2(run, tmp_path, file):
    assert run(tmp_path / "none.json").exit_code == 2
    file.write_text('{"zero": {"stage": 1}}')
    done = run(file)
    assert done.exit_code == 2 and "already" in done.stderr


def test_the_help_has_examples(run):
    done = run("--help")
    assert done.exit_code == 0 and "trilithon migrate ds_config.json > config.toml" in done.stdout
