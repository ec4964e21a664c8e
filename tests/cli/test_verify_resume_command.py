import sys

import pytest
import typer
from typer.testing import CliRunner

from trilithon.cli.verify_resume import verify_resume
from trilithon.errors import ConfigError
from trilithon.pretrain import load_pretrain
from trilithon.pretrain import verify_resume as module
from warm_python import python

app = typer.Typer()
app.command()(verify_resume)


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)


@pytest.fixture
def asked(monkeypatch) -> list:
    """What the command asks for; the answer is a difference when three steps are asked for."""
    calls: list = []

    def verify(config, *, steps, save_at, nproc):
        calls.append((config, steps, save_at, nproc))
        return module.Verdict(steps, save_at or 1, nproc, 5, 6, "the first difference is there" if steps == 3 else None)

    monkeypatch.setattr(module, "verify_resume", verify)
    return calls


def test_settings_come_from_options_or_from_a_run(asked, tmp_path):
    done = invoke("--data", "texts", "--set", "zero.stage=3", "--nproc", 2, "--steps", 4, "--at", 1)
    assert done.exit_code == 0 and "equal bit for bit" in done.output
    config, *rest = asked[0]
    assert config.data.paths == ("texts",) and config.engine.zero.stage == 3 and rest == [4, 1, 2]
    (tmp_path / "config.json").write_text(config.model_dump_json())
    assert invoke(tmp_path).exit_code == 0
    assert asked[1][0].engine == config.engine and asked[1][1:] == (6, None, 1)


def test_a_difference_is_printed_and_is_status_1(asked):
    done = invoke("--data", "texts", "--steps", 3)
    assert done.exit_code == 1 and "the first difference is there" in done.output


def test_a_run_and_a_file_are_one_too_many(asked, tmp_path):
    done = invoke(tmp_path, "--config", tmp_path / "x.toml")
    assert isinstance(done.exception, ConfigError) and "keep one of the two" in str(done.exception)
    assert asked == []


def test_processes_of_their_own_continue_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", python())  # by which they are started
    (tmp_path / "text.txt").write_text(" ".join(str(number**2) for number in range(500)))
    settings = {
        "data.paths": [str(tmp_path / "text.txt")], "data.cache": str(tmp_path / "cache"), "model.preset": "nano",
        "model.context": 32, "batch.micro_size": 2, "zero.stage": 3, "precision": "bf16",
    }  # fmt: skip
    verdict = module.verify_resume(load_pretrain(overrides=settings), steps=2, nproc=1)
    assert verdict.difference is None and verdict.values == 10 and verdict.tensors > 0
