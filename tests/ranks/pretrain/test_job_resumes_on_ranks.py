"""Runs on several ranks that stop and continue, on as many ranks or on others."""

import json
import os
import signal
from pathlib import Path

import pytest

from trilithon.pretrain import job as job_module
from trilithon.pretrain import load_pretrain, run
from trilithon.pretrain.loop import TrainLoop
from trilithon.testing import RanksError, run_ranks

TEXT = " ".join(str(number**2) for number in range(1200))  # no sequence comes twice


def settings(folder: Path, name: str, changes: dict):
    overrides = {
        "data.paths": [str(folder / "text.txt")],
        "data.cache": str(folder / "cache"),
        "run.out": str(folder / name),
        "model.preset": "nano",
        "model.context": 32,
        "run.steps": 6,
        "run.eval_every": 0,
        "run.eval_batches": 1,
        "run.sample_tokens": 0,
        "run.save_every": 3,
        "batch.micro_size": 2,
        "monitor.every": 1,
        "monitor.quiet": True,
        "monitor.tensorboard": False,
        "monitor.csv": False,
        "optimizer.lr": 0.01,
    }
    return load_pretrain(overrides=overrides | changes)


def trained(folder: str, name: str, changes: dict, signals: dict[int, tuple[int, int]] | None = None):
    """signals: rank -> (step, signal it gets). Returns (steps, exit status, train loss) and the sequences by step."""
    rank = int(os.environ.get("RANK", "0"))
    seen: list[list[tuple[int, ...]]] = []
    on_step, window = job_module.Monitor.on_step, TrainLoop._window

    def on_step_with_signal(self, step: int) -> None:
        if signals and rank in signals and signals[rank][0] == step:
            os.kill(os.getpid(), signals[rank][1])

    def window_that_is_seen(self, batches):
        found = window(self, batches)
        seen.append([tuple(row.tolist()) for inputs, _ in found for row in inputs])
        return found

    job_module.Monitor.on_step, TrainLoop._window = on_step_with_signal, window_that_is_seen
    try:
        report = run(settings(Path(folder), name, changes))
    finally:
        job_module.Monitor.on_step, TrainLoop._window = on_step, window
    return (report.steps, report.exit_status, report.train_loss), seen


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def samples(answers) -> list[list[tuple[int, ...]]]:
    """The sequences of each step, over all ranks."""
    return [sorted(row for rows in parts for row in rows) for parts in zip(*(seen for _, seen in answers))]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_signal_to_one_rank_saves_on_all_and_the_run_continues_exactly(folder, zero_stage):
    changes = {"zero.stage": zero_stage, "precision": "bf16", "run.save_every": 0}
    straight = run_ranks(trained, 2, str(folder), "straight", changes)
    stopped = run_ranks(trained, 2, str(folder), "out", changes, {1: (4, signal.SIGTERM)})
    assert [answer[0][:2] for answer in stopped] == [(4, 143), (4, 143)]
    resumed = run_ranks(trained, 2, str(folder), "out", changes | {"run.resume": "auto"})
    assert losses(folder / "out") == losses(folder / "straight")
    assert [answer[0] for answer in resumed] == [answer[0] for answer in straight], "every rank knows the whole curve"


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_keeps_the_batch_and_the_samples(folder, before, after):
    sizes = {"batch.micro_size": 8 // before, "zero.stage": 2}
    straight = run_ranks(trained, before, str(folder), "straight", sizes)
    run_ranks(trained, before, str(folder), "out", sizes, {0: (3, signal.SIGINT)})
    # as many sequences a step, whatever a command line for the other number of ranks would make of it
    resumed = run_ranks(trained, after, str(folder), "out", {"zero.stage": 2, "run.resume": "auto"})
    assert resumed[0][0][0] == 6
    for (step, loss), (same_step, expected) in zip(losses(folder / "out"), losses(folder / "straight"), strict=True):
        # sums of f32 in another order, through at most 3 steps of Adam
        assert step == same_step and loss == pytest.approx(expected, rel=1e-4)
    assert samples(resumed) == samples(straight)[3:]


def test_ranks_over_which_the_batch_does_not_split_are_refused_on_all(folder):
    run_ranks(trained, 1, str(folder), "out", {"batch.micro_size": 3})
    with pytest.raises(RanksError, match=r"3 sequences a step, .* over 2 ranks.*\(1, 3\)") as caught:
        run_ranks(trained, 2, str(folder), "out", {"run.resume": "auto", "run.steps": 9})
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)
