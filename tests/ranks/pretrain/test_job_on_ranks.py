import os
import signal
from pathlib import Path

import pytest
import torch

from trilithon.errors import DataError
from trilithon.pretrain import job as job_module
from trilithon.pretrain import load_model, load_pretrain, run
from trilithon.testing import ranks, run_ranks

TEXT = "the cat sat on the mat. the dog sat on the log.\n" * 200


def settings(folder: Path, name: str, **changes):
    overrides = {
        "data.paths": [str(folder / "text.txt")],
        "data.cache": str(folder / "cache"),
        "run.out": str(folder / name),
        "model.preset": "nano",
        "model.context": 32,
        "run.steps": 6,
        "run.eval_every": 3,
        "run.eval_batches": 100,
        "run.sample_tokens": 12,
        "run.temperature": 0.0,
        "batch.global_size": 8,
        "monitor.quiet": True,
        "monitor.tensorboard": False,
        "optimizer.lr": 0.01,
    }
    return load_pretrain(overrides=overrides | changes)


def trained(folder: str, name: str, changes: dict):
    report = run(settings(Path(folder), name, **changes))
    return report.validation_loss, report.train_loss, report.sample, report.tokens


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_two_ranks_train_as_one_does(tmp_path, zero_stage):
    (tmp_path / "text.txt").write_text(TEXT)
    alone = trained(str(tmp_path), "alone", {})
    together = run_ranks(trained, 2, str(tmp_path), "together", {"zero.stage": zero_stage})
    assert together[0] == together[1], "every rank knows the same"
    # the same samples and the same start: sums of f32 in another order through 6 steps of Adam
    assert together[0][0] == pytest.approx(alone[0], rel=1e-4)
    assert together[0][1] == pytest.approx(alone[1], rel=1e-4)
    assert together[0][3] == alone[3]
    model, tokenizer = load_model(tmp_path / "together")
    reference, _ = load_model(tmp_path / "alone")
    tokens = torch.from_numpy(tokenizer.encode(TEXT[:32])[None])
    torch.testing.assert_close(model(tokens), reference(tokens), atol=2e-3, rtol=1e-3)


def stopped(folder: str) -> tuple[int, int]:
    if os.environ["RANK"] == "1":
        plain = job_module.Monitor.on_step

        def on_step(self, step: int) -> None:
            plain(self, step)
            if step == 3:
                os.kill(os.getpid(), signal.SIGINT)

        job_module.Monitor.on_step = on_step
    report = run(settings(Path(folder), "out", **{"zero.stage": 3}))
    return report.steps, report.exit_status


def test_ctrl_c_on_one_rank_stops_all_after_the_same_step(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    assert run_ranks(stopped, 2, str(tmp_path)) == [(3, 130), (3, 130)]
    load_model(tmp_path / "out")


@ranks(2)
def test_data_that_only_one_rank_looks_at_is_an_error_on_all(world_size, tmp_path):
    with pytest.raises(DataError, match=r"text\.txt does not exist"):
        run(settings(tmp_path, "out"))
