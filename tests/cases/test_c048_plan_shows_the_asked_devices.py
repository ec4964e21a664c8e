"""C048: the plan shows exactly the asked devices; what contradicts CUDA_VISIBLE_DEVICES is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def dry_run(tmp_path, *options: str, visible: str | None):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('a dry run starts nothing')")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    command = [
        sys.executable,
        "-m",
        "trilithon.cli.main",
        "launch",
        "--dry-run",
        "--json",
        *options,
        str(script),
        "arg one",
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)


def planned(done):
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    return [(row["rank"], row["device"], row["environment"].get("CUDA_VISIBLE_DEVICES")) for row in rows]


def test_the_variable_is_taken_at_its_word(tmp_path):
    assert planned(dry_run(tmp_path, visible="1")) == [(0, "1", "1")]
    assert planned(dry_run(tmp_path, visible="3,1")) == [(0, "3", "3,1"), (1, "1", "3,1")]
    assert planned(dry_run(tmp_path, "--nproc", "1", visible="3,1")) == [(0, "3", "3")]


@pytest.mark.parametrize("options", [["--include", "localhost:1"], ["-i", "localhost"]])
def test_a_filter_that_agrees_with_the_variable_is_kept(tmp_path, options):
    assert planned(dry_run(tmp_path, *options, visible="1")) == [(0, "1", "1")]


@pytest.mark.parametrize(
    "options, told",
    [
        (["--include", "localhost:0"], "device 0, but CUDA_VISIBLE_DEVICES=1 hides it"),
        (["--include", "localhost:0,1"], "device 0, but CUDA_VISIBLE_DEVICES=1 hides it"),
        (["--exclude", "localhost:0"], "device 0, but CUDA_VISIBLE_DEVICES=1 hides it"),
        (["--exclude", "localhost:1"], "leaves no slot"),
        (["--nproc", "2"], "CUDA_VISIBLE_DEVICES=1 shows 1 device"),
        (["--include", "localhost:1", "--exclude", "localhost:0"], "both given"),
        (["--include", "elsewhere:1"], "names elsewhere, which is not there"),
        (["--include", "localhost:1", "--nproc", "1"], "Keep one of them"),
    ],
)
def test_conflicts_are_errors(tmp_path, options, told):
    done = dry_run(tmp_path, *options, visible="1")
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stdout == ""


def test_a_host_file_with_one_entry_for_this_machine_works(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n")
    assert planned(dry_run(tmp_path, "--host-file", str(hosts), visible="1")) == [(0, "1", "1")]
    assert planned(dry_run(tmp_path, "--host-file", str(hosts), "--device", "cpu", visible=None)) == [(0, "cpu", "")]


def test_a_host_file_that_asks_more_than_is_visible_is_an_error(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=4\n")
    done = dry_run(tmp_path, "--host-file", str(hosts), visible="1")
    assert done.returncode == 2 and "4 processes on localhost, but CUDA_VISIBLE_DEVICES=1 shows 1 device" in done.stderr
    done = dry_run(tmp_path, "--host-file", str(hosts), "--include", "localhost:0", visible="1")
    assert done.returncode == 2 and "hides it" in done.stderr


def test_the_devices_reach_the_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib\n"
        "rank = os.environ['LOCAL_RANK']\n"
        "note = os.environ['CUDA_VISIBLE_DEVICES'] + ' ' + os.environ['OMP_NUM_THREADS']\n"
        "pathlib.Path(__file__).with_name(f'seen-{rank}').write_text(note)\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "5,2,7"}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-m", "trilithon.cli.main", "launch", "--include", "localhost:2,5", str(script)]
    subprocess.run(command, env=environment, check=True, timeout=40)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [(tmp_path / f"seen-{rank}").read_text() for rank in (0, 1)] == [f"2,5 {threads}"] * 2
