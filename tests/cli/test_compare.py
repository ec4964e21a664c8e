"""The command as it is typed; what comparisons find is tested in tests/ranks/compare."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from warm_python import python

COMPARE = ["-m", "trilithon.cli.main", "compare"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "compare_script.py"


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python(), *COMPARE, *arguments], capture_output=True, text=True, timeout=120, check=False)


def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"optimizer": {"kind": "sgd", "lr": 0.1}, "zero": {"stage": 3}}))
    return str(path)


def test_the_example_agrees_with_plain_torch(tmp_path):
    done = compare("plain", config(tmp_path), "--script", str(EXAMPLE), "--steps", "1")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines()[-1] == "verdict: A and B agree within rounding"


@pytest.mark.parametrize(
    "sides, script, told",
    [
        (("plain", "plain"), EXAMPLE, "both sides are plain"),
        (("plain", "absent.json"), EXAMPLE, "absent.json"),
        (("plain", "{}"), "nowhere.py", "nowhere.py does not exist"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_once(sides, script, told):
    done = compare(*sides, "--script", str(script))
    assert done.returncode == 2
    assert told in done.stderr


def test_a_script_that_fails_shows_its_traceback(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def build():\n    raise OSError('no weights')\ndef batches(rank, world_size):\n    yield 1\n")
    done = compare("plain", config(tmp_path), "--script", str(script), "--nproc", "1")
    assert done.returncode == 2
    assert "OSError: no weights" in done.stderr


def test_a_script_that_lacks_something_is_told_without_a_traceback(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def build(): ...\n")
    done = compare("plain", config(tmp_path), "--script", str(script), "--nproc", "1")
    assert done.returncode == 2
    assert "does not define batches. It needs build() -> nn.Module" in done.stderr and "Traceback" not in done.stderr
