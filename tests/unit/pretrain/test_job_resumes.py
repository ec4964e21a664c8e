"""A run that was stopped and continued is the run that was never stopped: records, weights, curve and files."""

import json
import os
import signal

import pytest
import torch
from torch import nn

from trilithon.checkpoint import background
from trilithon.errors import CheckpointError, ConfigError, DataError
from trilithon.pretrain import job as job_module
from trilithon.pretrain import load_model, load_pretrain, run
from trilithon.pretrain.start import settings_of_run

TEXT = "the cat sat on the mat. the dog sat on the log.\n" * 100


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def settings(source, out, **changes):
    overrides = {
        "data.paths": [str(source)],
        "data.cache": str(out.parent / "cache"),
        "run.out": str(out),
        "model.preset": "nano",
        "model.context": 32,
        "run.steps": 8,
        "run.eval_every": 3,
        "run.eval_batches": 1,
        "run.sample_tokens": 4,
        "batch.micro_size": 2,
        "batch.accumulation": 2,
        "monitor.every": 1,
        "monitor.quiet": True,
        "monitor.tensorboard": False,
        "optimizer.lr": 0.01,
    }
    return load_pretrain(overrides=overrides | changes)


def records(out) -> list[dict]:
    """What was recorded, without what depends on the clock."""
    clock = ("time", "tokens_per_s")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in clock} for line in lines]


def signal_at(monkeypatch, step: int, number: signal.Signals) -> None:
    def on_step(self, now: int) -> None:
        if now == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(job_module.Monitor, "on_step", on_step)


def same_weights(one, other) -> bool:
    first, second = load_model(one)[0].state_dict(), load_model(other)[0].state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("zero_stage", "precision", "number"),
    [(0, "fp32", signal.SIGINT), (3, "bf16", signal.SIGTERM), (2, "fp16", signal.SIGTERM)],
)
def test_a_stopped_run_that_continues_equals_one_that_was_never_stopped(  # noqa: PLR0917 (fixtures)
    source, tmp_path, monkeypatch, zero_stage, precision, number
):
    changes = {"zero.stage": zero_stage, "precision": precision}
    straight = run(settings(source, tmp_path / "straight", **changes))
    with monkeypatch.context() as patch:
        signal_at(patch, 4, number)
        stopped = run(settings(source, tmp_path / "stopped", **changes))
    assert stopped.steps == 4 and stopped.exit_status == 128 + number
    assert (tmp_path / "stopped" / "model.pt").exists() == (number == signal.SIGINT)
    resumed = run(load_pretrain(settings_of_run(tmp_path / "stopped"), {"run.resume": str(tmp_path / "stopped")}))
    assert records(tmp_path / "stopped") == records(tmp_path / "straight")
    assert same_weights(tmp_path / "stopped", tmp_path / "straight")
    assert (resumed.train_loss, resumed.validation_loss, resumed.sample, resumed.tokens, resumed.exit_status) == (
        straight.train_loss, straight.validation_loss, straight.sample, straight.tokens, 0
    )  # fmt: skip


def test_what_forward_draws_continues_too(source, tmp_path, monkeypatch):
    class Noisy(job_module.GPT):
        def __init__(self, shape) -> None:
            super().__init__(shape)
            self.register_forward_hook(lambda module, args, loss: loss * (0.5 + torch.rand(())))  # as dropout would

    monkeypatch.setattr(job_module, "GPT", Noisy)
    run(settings(source, tmp_path / "straight", **{"run.sample_tokens": 0}))
    with monkeypatch.context() as patch:
        signal_at(patch, 5, signal.SIGTERM)
        run(settings(source, tmp_path / "stopped", **{"run.sample_tokens": 0}))
    run(settings(source, tmp_path / "stopped", **{"run.resume": "auto", "run.sample_tokens": 0}))
    assert records(tmp_path / "stopped") == records(tmp_path / "straight")


def test_checkpoints_by_interval_and_the_newest_are_kept(source, tmp_path):
    out = tmp_path / "out"
    run(settings(source, out, **{"run.save_every": 2, "checkpoints.keep": 2, "run.steps": 7}))
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == ["latest", "step-00000006", "step-00000007"]
    assert (out / "checkpoints" / "latest").read_text().strip() == "step-00000007"


def test_sigusr1_saves_and_the_run_goes_on(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        signal_at(patch, 3, signal.SIGUSR1)
        assert run(settings(source, out, **{"run.steps": 5})).exit_status == 0
    assert [path.name for path in (out / "checkpoints").iterdir() if path.is_dir()] == ["step-00000003"]


def test_a_finished_run_is_lengthened(source, tmp_path):
    out = tmp_path / "out"
    run(settings(source, out, **{"run.save_every": 4, "run.steps": 4, "lr_schedule": "constant"}))
    report = run(load_pretrain(settings_of_run(out), {"run.resume": str(out), "run.steps": 6}))
    assert report.steps == 6
    assert [line["step"] for line in records(out) if "loss" in line] == [1, 2, 3, 4, 5, 6]


def test_a_run_branches_from_anothers_checkpoint(source, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    run(settings(source, first, **{"run.save_every": 4, "run.steps": 4}))
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.is_file()}
    report = run(settings(source, second, **{"run.resume": str(first), "run.steps": 6}))
    assert report.steps == 6 and [line["step"] for line in records(second) if "loss" in line] == [5, 6]
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.is_file()} == before


def test_other_data_is_refused(source, tmp_path):
    out = tmp_path / "out"
    run(settings(source, out, **{"run.save_every": 2, "run.steps": 2}))
    source.write_text(TEXT.replace("cat", "cow"))
    with pytest.raises(DataError, match=r"trained on other data: unigram_entropy was .* and is"):
        run(settings(source, out, **{"run.resume": "auto"}))
    assert len(records(out)) == 3, "nothing was taken back"


def test_a_checkpoint_of_a_script_is_refused_by_the_job(source, tmp_path):
    import trilithon

    with trilithon.initialize(nn.Linear(2, 2), {"optimizer": "adamw"}) as engine:
        engine.save(tmp_path / "script")
    with pytest.raises(CheckpointError, match="was not saved by `trilithon train`"):
        run(settings(source, tmp_path / "out", **{"run.resume": str(tmp_path / "script")}))


def test_a_failed_save_in_the_background_is_told_and_the_run_goes_on(source, tmp_path, monkeypatch, capsys):
    real, calls = background.complete, []

    def complete(*args):
        calls.append(args)
        if len(calls) == 1:
            raise CheckpointError("the disk went away.")
        return real(*args)

    monkeypatch.setattr(background, "complete", complete)
    straight = run(settings(source, tmp_path / "straight", **{"run.steps": 6}))
    changes = {"run.steps": 6, "run.save_every": 2, "monitor.quiet": False}
    report = run(settings(source, tmp_path / "out", **changes))
    assert report.exit_status == 0 and report.validation_loss == straight.validation_loss
    assert "No checkpoint of step 2: the disk went away. The run goes on." in capsys.readouterr().out
    tags = [path.name for path in (tmp_path / "out" / "checkpoints").iterdir() if path.is_dir()]
    assert sorted(tags) == ["step-00000004", "step-00000006"]


def test_without_saving_on_signals_ctrl_c_leaves_weights_and_no_checkpoint(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    signal_at(monkeypatch, 3, signal.SIGINT)
    report = run(settings(source, out, **{"run.save_on_signal": False}))
    assert report.exit_status == 130 and (out / "model.pt").exists() and not (out / "checkpoints").exists()


def test_a_run_with_checkpoints_is_not_overwritten(source, tmp_path):
    out = tmp_path / "out"
    run(settings(source, out, **{"run.save_every": 2, "run.steps": 2}))
    with pytest.raises(ConfigError, match=r"or --resume .* to continue it"):
        run(settings(source, out))


def test_a_checkpoint_behind_the_last_step_is_told(source, tmp_path, capsys):
    out = tmp_path / "out"
    run(settings(source, out, **{"run.save_every": 4, "run.steps": 4}))
    before = records(out)
    again = {"run.resume": str(out)}
    with pytest.raises(ConfigError, match=r"is at step 4, behind the last of --steps 3.*--steps 7 to train 3 more"):
        run(settings(source, out, **again, **{"run.steps": 3}))
    assert records(out) == before
    assert run(settings(source, out, **again, **{"run.steps": 4, "monitor.quiet": False})).steps == 4
    assert "Nothing to train: all 4 steps were done before. Give a larger --steps" in capsys.readouterr().out
