from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from warm_python import python

DOCTOR = ["-m", "trilithon.cli.main", "doctor"]


def test_doctor_keeps_to_its_time_and_says_what_it_measured():
    start = time.monotonic()
    done = subprocess.run([python(), *DOCTOR, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["can_train"] is True
    assert facts["took_s"] < 20 and time.monotonic() - start < 20 + 5  # and python's own start on a busy machine
    ranks = facts["bandwidth"]["two_ranks"]
    assert ranks.get("reduce_scatter_bytes_per_s", 0) > 0 or "not done within" in ranks["trouble"]
    assert facts["bandwidth"]["memory_copy"]["bytes_per_s"] > 0
    assert facts["torch"]["backends"]["gloo"] is True


def test_without_bandwidth_nothing_is_measured():
    done = subprocess.run(
        [python(), *DOCTOR, "--no-bandwidth"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "two ranks" not in done.stdout
    assert "kernel adam_step" in done.stdout


def test_a_broken_torch_is_an_error_and_the_rest_is_still_told(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libc10.so: cannot open shared object file')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, *DOCTOR], capture_output=True, text=True, timeout=30, check=False, env=environment
    )
    assert done.returncode == 1
    assert "error: torch cannot be imported: ImportError: libc10.so" in done.stdout
    assert "host memory" in done.stdout
