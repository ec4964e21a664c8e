""".ci/run with a make that only says what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = """#!/usr/bin/env bash
target="$1"
echo "ran $target"
if [ "$target" = test ]; then echo "3 passed in 1.00s"; status=$TEST_STATUS; else status=$LINT_STATUS; fi
if [ "$status" != 0 ]; then echo "make: *** [Makefile:1: $target] Error $status" >&2; fi
exit "$status"
"""


@pytest.mark.parametrize(("lint", "test"), [(0, 0), (2, 0), (0, 2), (2, 2)])
def test_both_parts_run_and_either_fails_the_whole(lint, test, tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{make.parent}:{os.environ['PATH']}",
        "LINT_STATUS": str(lint),
        "TEST_STATUS": str(test),
    }
    ended = subprocess.run(
        [str(tmp_path / ".ci" / "run")], capture_output=True, text=True, check=False, env=environment, timeout=30
    )
    said = ended.stdout.splitlines()
    assert "ran lint" in said and "ran test" in said
    assert said[-1] == "3 passed in 1.00s"
    assert (ended.returncode == 0) == (lint == test == 0)
