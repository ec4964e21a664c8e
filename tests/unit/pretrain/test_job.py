import json
import math
import os
import signal

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trilithon.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from trilithon.pretrain import job as job_module
from trilithon.pretrain import load_model, load_pretrain, run


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat. the dog sat on the log.\n" * 200)
    return path


def settings(source, out, **changes):
    overrides = {
        "data.paths": [str(source)],
        "data.cache": str(out.parent / "cache"),
        "run.out": str(out),
        "model.preset": "nano",
        "model.context": 32,
        "run.steps": 12,
        "run.eval_every": 5,
        "run.eval_batches": 2,
        "run.sample_tokens": 8,
        "batch.micro_size": 4,
        "monitor.every": 3,
        "monitor.quiet": True,
        "optimizer.lr": 0.01,
    }
    return load_pretrain(overrides=overrides | changes)


def records(out) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_a_model_that_has_learnt(source, tmp_path):
    out = tmp_path / "out"
    report = run(settings(source, out, **{"run.steps": 40}))
    assert report.exit_status == 0 and report.steps == 40 and report.tokens == 40 * 4 * 32
    assert report.validation_loss < report.unigram_entropy - 0.3
    model, tokenizer = load_model(out)
    tokens = torch.from_numpy(tokenizer.encode(source.read_text()[:33])[None])
    with torch.no_grad():
        assert float(model(tokens[:, :-1], tokens[:, 1:])) < report.unigram_entropy
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "loss.png", "metrics.jsonl", "csv", "tensorboard", "model.pt", "sample.txt"}
    assert not [name for name in names if "partial" in name]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_records_hold_the_steps_and_the_evaluations(source, tmp_path):
    out = tmp_path / "out"
    report = run(settings(source, out))
    training = [record for record in records(out) if "loss" in record]
    validation = [record for record in records(out) if "validation/loss" in record]
    assert [record["step"] for record in training] == [1, 3, 6, 9, 12]
    assert [record["step"] for record in validation] == [5, 10, 12]
    assert validation[-1]["validation/loss"] == report.validation_loss
    assert training[1]["tokens"] == 3 * 4 * 32 and training[1]["lr"] > 0 and training[1]["grad_norm"] > 0
    assert {"memory/parameters", "memory/optimizer"} <= set(training[0])
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 3, 6, 9, 12]
    rows = (out / "csv" / "loss.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[2]) for row in rows] == [record["loss"] for record in training]


def test_two_runs_are_equal_number_by_number(source, tmp_path):
    reports = [run(settings(source, tmp_path / name)) for name in ("one", "two")]
    first, second = (
        [(record["step"], record.get("loss"), record.get("validation/loss")) for record in records(tmp_path / name)]
        for name in ("one", "two")
    )
    assert first == second and reports[0].sample == reports[1].sample
    other = run(settings(source, tmp_path / "three", seed=1))
    assert other.validation_loss != reports[0].validation_loss


def test_accumulation_reads_as_much_as_a_larger_batch(source, tmp_path):
    every = {"run.eval_batches": 100}  # the whole of the held-out text
    wide = run(settings(source, tmp_path / "wide", **{"batch.micro_size": 8}, **every))
    deep = run(settings(source, tmp_path / "deep", **{"batch.micro_size": 4, "batch.accumulation": 2}, **every))
    assert wide.tokens == deep.tokens
    # the same samples in the same order: sums of f32 in another order, 12 steps of Adam
    assert wide.validation_loss == pytest.approx(deep.validation_loss, rel=1e-3)


def test_ctrl_c_ends_the_run_after_the_step_and_keeps_the_weights(source, tmp_path, monkeypatch):
    monkeypatch.setattr(
        job_module.Monitor,
        "on_step",
        lambda self, step: os.kill(os.getpid(), signal.SIGINT) if step == 4 else None,
    )
    out = tmp_path / "out"
    report = run(settings(source, out))
    assert report.exit_status == 130 and report.steps == 4 and math.isnan(report.validation_loss)
    load_model(out)
    assert not (out / "sample.txt").exists()


def test_a_loss_that_is_not_finite_stops_with_its_step_and_a_way_out(source, tmp_path):
    options = {"optimizer.lr": 1e30, "lr_schedule": "constant", "clip_norm": 0.0}
    with pytest.raises(NonFiniteError, match=r"stopped at step \d+ \(learning rate 1e\+30.*smaller --lr"):
        run(settings(source, tmp_path / "out", **options))
    assert not (tmp_path / "out" / "model.pt").exists()


def test_a_folder_with_a_run_is_not_overwritten_unless_asked(source, tmp_path):
    out = tmp_path / "out"
    run(settings(source, out))
    with pytest.raises(ConfigError, match=r"already holds a run .*--overwrite"):
        run(settings(source, out))
    run(settings(source, out, **{"run.overwrite": True, "run.steps": 3}))
    assert [record["step"] for record in records(out)] == [1, 3, 3], "nothing of the old run is left"


def test_what_was_refused_before_training_does_not_hold_the_folder(source, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match="does not exist"):
        run(settings(tmp_path / "absent", out))
    assert not out.exists()
    run(settings(source, out, **{"run.steps": 1}))
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(DataError, match="does not exist"):
        run(settings(tmp_path / "absent", out, **{"run.overwrite": True}))
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before, "the old run is still there"


def test_a_disk_without_room_for_the_weights_is_refused_before_training(source, tmp_path, monkeypatch):
    real = job_module.shutil.disk_usage
    monkeypatch.setattr(job_module.shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"1,000 bytes free, and the weights at the end take 460,288\. Free some"):
        run(settings(source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        run(settings(source, tmp_path / "file" / "out"))


def test_a_context_longer_than_the_held_out_text_is_an_error(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("abcdefghij" * 40)  # 20 bytes are held out
    with pytest.raises(DataError, match="context of at most 20"):
        run(settings(path, tmp_path / "out"))


def test_weights_that_cannot_be_written_are_an_error_that_names_them(source, tmp_path, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("PytorchStreamWriter failed writing file: No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"model\.pt cannot be written"):
        run(settings(source, tmp_path / "out"))
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith("model.pt")]


def test_bpe_trains_through_the_same_job(source, tmp_path):
    options = {"data.tokenizer": "bpe", "data.vocab_size": 270}
    report = run(settings(source, tmp_path / "out", **options))
    assert report.bytes_per_token > 1.5
    assert load_model(tmp_path / "out")[1].vocab_size == 270


def test_the_profile_of_one_step_lands_in_the_folder(source, tmp_path):
    run(settings(source, tmp_path / "out", **{"monitor.profile_step": 2}))
    assert "profile of step 2" in (tmp_path / "out" / "profile-step2.txt").read_text()
