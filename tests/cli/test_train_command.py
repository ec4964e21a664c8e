import os
import subprocess
import sys

import pytest

from trilithon.cli.train import complete
from warm_python import python

HELP = """
import sys
from trilithon.cli.main import main
try:
    main(["train", "--help"])
finally:
    assert not any(name.split(".")[0] in ("torch", "numpy") for name in sys.modules), "imported"
"""


def trilithon(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [python(), "-m", "trilithon.cli.main", "train", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
    )


def test_help_comes_without_torch_and_with_examples():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for shown in ("--nproc", "--zero-stage", "--set", "Examples:", "trilithon train --data notes/ --steps 200"):
        assert shown in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no data is given: pass --data"),
        (["--data", "x", "--width", "100", "--heads", "3"], "nearest widths that do: 96 and 102"),
        (["--data", "x", "--set", "zero.stage"], "write KEY=VALUE"),
        (["--data", "x", "--set", "zero.stag=3"], "did you mean zero.stage?"),
        (["--data", "x", "--zero-stage", "7"], "zero.stage"),
        (["--data", "x", "--nproc", "0"], "--nproc 0: give at least 1"),
        (["--data", "x", "--config", "absent.json"], "absent.json"),
        (["--data", "x", "--max-restarts", "2"], "add --save-every N"),
        (["--resume"], "--resume needs to know which run"),
        (["--resume", "absent"], "absent/config.json does not hold the settings of a run"),
    ],
)
def test_wrong_settings_are_one_line_before_anything_starts(arguments, words):
    done = trilithon(*arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert words in done.stderr and "Traceback" not in done.stderr


def test_a_dry_run_shows_the_run_and_starts_nothing(tmp_path):
    done = trilithon("--data", "x", "--nproc", 2, "-z", 2, "-p", "bf16", "--out", tmp_path / "out", "--dry-run")
    assert done.returncode == 0 and done.stderr == ""
    for shown in ("zero.stage = 2", "run.steps = 300", "on each of 2 ranks", "together"):
        assert shown in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "completed"),
    [
        (["--resume"], ["--resume", "auto"]),
        (["--resume", "--nproc", "2"], ["--resume", "auto", "--nproc", "2"]),
        (["--resume", "runs/a", "--steps", "9"], ["--resume", "runs/a", "--steps", "9"]),
        (["--data", "x"], ["--data", "x"]),
        (["--recompute"], ["--recompute", "full"]),
        (["--recompute", "selective", "--tp", "2"], ["--recompute", "selective", "--tp", "2"]),
        (["--recompute", "texts/"], ["--recompute", "full", "texts/"]),
    ],
)
def test_resume_and_recompute_may_stand_alone(arguments, completed):
    assert complete(arguments) == completed


def test_a_mistyped_command_is_answered_with_the_nearest():
    for typed, answer in (("trian", "Did you mean train?"), ("frobnicate", "There are check, migrate, train, launch")):
        done = subprocess.run(
            [sys.executable, "-m", "trilithon", typed], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2 and f"There is no command {typed}. {answer}" in done.stderr


def test_a_missing_path_is_one_line(tmp_path):
    done = trilithon("--data", tmp_path / "absent", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.count("absent does not exist") == 1 and "Traceback" not in done.stderr


def test_another_launchers_ranks_are_not_started_again():
    done = trilithon("--data", "x", "--nproc", "2", RANK="0", WORLD_SIZE="4")
    assert done.returncode == 1 and "already one of WORLD_SIZE=4 ranks" in done.stderr


def test_one_process_trains_and_options_reach_the_run(tmp_path):
    (tmp_path / "a.txt").write_text("some text to learn from, again and again.\n" * 200)
    done = trilithon(
        *("--data", tmp_path / "a.txt", "--out", tmp_path / "out", "--cache", tmp_path / "cache"),
        *("--model", "nano", "--context", 32, "--steps", 4, "--eval-batches", 1, "--sample-tokens", 5),
        *("--micro-batch", 2, "--set", "monitor.every=2", "--prompt", "some", "--optimizer", "lion", "--lr", "1e-4"),
    )
    assert done.returncode == 0, done.stderr
    assert "step 2/4" in done.stdout and "step 4/4" in done.stdout and "unigram entropy" in done.stdout
    assert "sample:\nsome" in done.stdout
    assert (tmp_path / "out" / "loss.png").exists()
    assert '"kind":"lion"' in (tmp_path / "out" / "config.json").read_text().replace(" ", "")


def test_a_quiet_run_prints_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("some text to learn from, again and again.\n" * 200)
    done = trilithon(
        *(tmp_path / "a.txt", "--out", tmp_path / "out", "--cache", tmp_path / "cache", "--quiet"),
        *("--model", "nano", "--context", 32, "--steps", 2, "--eval-batches", 1, "--sample-tokens", 0),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
