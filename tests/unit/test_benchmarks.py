"""The benchmark scripts answer --help, run at toy size, agree in their losses, and leave no process behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from warm_python import python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py"))
LIMIT_S = 240  # a machine that is busy with other things; a quiet one needs a few seconds

sys.path.insert(0, str(BENCHMARKS))
from largest_model import largest  # noqa: E402
from side_by_side.catalogue import catalogue, reference_of, select  # noqa: E402
from side_by_side.measure import Measured, Plan  # noqa: E402
from side_by_side.shape import SIZES, Shape  # noqa: E402
from side_by_side.summary import loss_spreads, memory_row, ratio, time_row  # noqa: E402
from side_by_side.workload import batch, build  # noqa: E402


def run(script: str, *arguments: object, cold: bool = False) -> subprocess.CompletedProcess[str]:
    """cold: in an interpreter that has imported nothing yet."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "OUT")}
    environment |= {"PYTHONPATH": str(BENCHMARKS.parent / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable if cold else python(), str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_how_to_call_it(script):
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert f"benchmarks/{script}" in done.stdout


def test_two_systems_train_alike_side_by_side(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = run(
        "train_step.py", "--size", "tiny", "--only", "trilithon-3-fp32", "--rounds", 2, "--steps", 1, "--warmup", 1,
        "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(out)
    assert [row["system"] for row in rows] == ["ddp-fp32", "trilithon-3-fp32"]
    for row in rows:
        assert row["n"] == 2 and len(row["losses"]) == 3
        assert 0 < row["wall_s_min"] <= row["wall_s"]
        assert row["step_peak_mib"] is None or row["step_peak_mib"] > 50
        assert {"date", "hardware", "torch", "command", "import_s", "setup_s"} <= row.keys()
    assert rows[0]["wall_ratio"] == 1.0
    assert rows[0]["ledger_mb_per_step"] is None and rows[1]["ledger_mb_per_step"] > 0
    assert "within the tolerance" in done.stdout


def test_checkpoints_are_written_and_read_by_every_system(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = run(
        "checkpoint.py", "--parameters", 1e6, "--rounds", 1, "--only", "trilithon", "--folder", tmp_path, "--out", out
    )
    assert done.returncode == 0, done.stdout + done.stderr
    raw, ours = rows_of(out)
    assert (raw["system"], ours["system"]) == ("raw", "trilithon") and ours["parameters"] == 2**20
    assert raw["payload_bytes"] == raw["file_bytes"] == 12 * 2**20
    assert ours["file_bytes"] == pytest.approx(12 * 2**20, rel=0.02), "every byte once, and no padding"
    assert 0 < ours["blocked_s"] <= ours["async_s"] and raw["blocked_s"] is None
    assert ours["save_share_of_raw"] > 0 and {"date", "hardware", "torch", "command"} <= ours.keys()
    assert list(tmp_path.iterdir()) == [out], "nothing is left behind"


def test_bytes_of_activations_fall_and_losses_agree(tmp_path):
    out = tmp_path / "rows.jsonl"
    size = ["--ranks", 1, "--layers", 3, "--width", 32, "--heads", 2, "--tokens", 16, "--batch", 2]
    done = run("activation_memory.py", *size, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["manner"]: row for row in rows_of(out)}
    assert list(rows) == ["none", "selective", "full", "full, host"]
    alive = [row["alive_bytes"] for row in rows.values()]
    assert alive == sorted(alive, reverse=True)
    unit = 2 * 16 * 32 * 4
    assert rows["full"]["checkpoints_device_bytes"] == rows["full, host"]["checkpoints_host_bytes"] == 3 * unit


def test_ctrl_c_leaves_no_process(tmp_path):
    command = [
        sys.executable, str(BENCHMARKS / "train_step.py"), "--size", "tiny", "--only", "ddp-fp32", "--rounds", "100000",
        "--out", str(tmp_path / "rows.jsonl"),
    ]  # fmt: skip
    environment = {**os.environ, "MARKED_BY_TEST": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as it:
        try:
            assert it.stderr is not None
            while "turn 1 of" not in it.stderr.readline():  # the ranks are up and stepping
                assert it.poll() is None
            assert len(marked(tmp_path)) == 4  # the benchmark, a host, two ranks
            it.send_signal(signal.SIGINT)
            assert it.wait(LIMIT_S) == 130
        finally:
            it.kill()
    for _ in range(100):  # killed processes take a moment to be gone
        if not marked(tmp_path):
            break
        time.sleep(0.05)
    assert marked(tmp_path) == []


def marked(tmp_path: Path) -> list[int]:
    """Processes that inherited this test's environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARKED_BY_TEST={tmp_path}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_start_up_counts_modules_and_seconds(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = run("start_up.py", "--repeats", 1, "--only", "trilithon", "initialize", "--out", out, cold=True)
    assert done.returncode == 0, done.stderr
    lazy, whole = rows_of(out)
    assert lazy["modules"] < 50 < whole["modules"]
    assert 0 < lazy["wall_s"] < whole["wall_s"]


def test_the_gpu_check_runs_without_a_gpu(tmp_path):
    out = tmp_path / "check.json"
    done = run("gpu_check.py", "--parts", "kernels", "equality", "throughput", "overlap", "--stages", 1, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["kernels"]["ok"] and found["equality"]["runs"]["stage 1 fp16"]["ok"]
    if found["gpu"] == "none":
        assert "not measured: no GPU" in done.stdout
        assert found["throughput"]["share_of_peak"] == "not measured: no GPU"
        assert found["overlap"]["why"] == "not measured: no GPU"


# ---------------------------------------------------------------------------------------------------------------- pure
def measured(name: str, turns: list[list[float]], losses: list[float]) -> Measured:
    one = Measured(catalogue()[name], turns=turns, cpu_turns=turns, losses=losses, peak_bytes=3 << 20)
    one.ready = {"import_s": 1.0, "setup_s": 2.0, "setup_peak_bytes": 2 << 20}
    return one


def test_patterns_reach_variants_only_when_they_say_so():
    known = catalogue()
    assert {system.name for system in select(["ddp-*"], known)} == {"ddp-fp32", "ddp-amp"}
    assert {system.name for system in select(["ddp-*+clip"], known)} == {"ddp-fp32+clip", "ddp-amp+clip"}
    with pytest.raises(ValueError, match="no system is called 'nothing'"):
        select(["nothing"], known)


def test_the_reference_has_the_same_accumulation_and_clipping():
    known = catalogue()
    system = known["trilithon-2-bf16+accum4+tcp"]
    assert reference_of(system, "ddp-fp32", known).name == "ddp-fp32+accum4"
    assert system.family == ("bf16", 4, 0.0)


def test_ratios_are_taken_turn_by_turn():
    quiet_then_busy = [[1.0, 1.0], [10.0, 10.0], [1.0, 1.0]]
    twice_as_slow = [[2.0, 2.0], [20.0, 20.0], [2.2, 2.2]]
    assert ratio(twice_as_slow, quiet_then_busy) == (2.0, 2.0, 2.2)


def test_a_row_holds_median_quartiles_and_ratio():
    reference = measured("ddp-fp32", [[1.0, 3.0], [2.0, 2.0]], [9.0, 8.0])
    row = time_row(reference, reference, SIZES["tiny"], Plan())
    assert (row["wall_s"], row["wall_s_min"], row["wall_ratio"], row["n"]) == (2.0, 1.0, 1.0, 4)
    assert row["tokens_per_s"] == 2 * 2 * 64 / 2.0


def test_losses_are_compared_within_a_family_only():
    found = [
        measured("ddp-fp32", [[1.0]], [9.0, 8.0]),
        measured("trilithon-3-fp32", [[1.0]], [9.0, 8.25]),
        measured("ddp-amp", [[1.0]], [7.0, 1.0]),
    ]
    spreads = loss_spreads(found)
    assert spreads["fp32", 1, 0.0] == (0.25, "trilithon-3-fp32 from ddp-fp32")
    assert spreads["bf16", 1, 0.0] == (0.0, "")
    found[1].losses[0] = float("nan")
    assert not loss_spreads(found)["fp32", 1, 0.0][0] <= 1e9


def test_the_slope_over_depths_is_the_memory_of_a_parameter():
    points = []
    for depth in (1, 2, 4):
        shape = Shape(depth, 64, 1, 1, 16)
        one = measured("trilithon-3-fp32", [[1.0]], [9.0])
        one.peak_bytes = 12 * shape.num_parameters() + (100 << 20)
        one.ready["setup_peak_bytes"] = 4 * shape.num_parameters() + (50 << 20)
        points.append((shape, one))
    row = memory_row("x", points, Plan())
    assert (row["step_bytes_per_parameter"], row["step_fixed_mib"]) == (12.0, 100)
    assert (row["setup_bytes_per_parameter"], row["setup_fixed_mib"]) == (4.0, 50)


def test_the_model_has_the_parameters_that_its_shape_counts_and_the_data_repeat():
    shape = SIZES["tiny"]
    assert sum(param.numel() for param in build(shape).parameters()) == shape.num_parameters()
    assert batch(shape, 1, 3).equal(batch(shape, 1, 3))
    assert not batch(shape, 0, 3).equal(batch(shape, 1, 3))


def test_a_mesh_trains_like_plain_torch_beside_it(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = run(
        "parallel.py", "--only", "norms", "--ranks", 2, "--rounds", 2, "--steps", 1, "--batch", 2, "--context", 16,
        "--width", 32, "--heads", 4, "--layers", 1, "--vocab", 64, "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(out)
    assert [(row["axis"], row["system"]) for row in rows] == [("norms", "torch"), ("norms", "trilithon")]
    assert rows[0]["losses_apart"] < 1e-3 and rows[0]["speed_ratio"] == 1.0


def test_the_largest_size_is_found_between_one_that_fits_and_one_that_does_not():
    for true_size, first, most in itertools.product((0, 1, 7, 33, 100, 250), (1, 20, 200), (100, 1000)):
        tried: list[int] = []

        def fits(layers: int, true_size: int = true_size, tried: list[int] = tried) -> dict:
            tried.append(layers)
            return {"ok": layers <= true_size}

        found, tries = largest(fits, first, most, within=0.0)
        assert found == min(true_size, most), (true_size, first, most)
        assert [each["layers"] for each in tries] == tried and len(set(tried)) == len(tried)
        near, _ = largest(fits, first, most, within=0.1)
        assert near <= found <= max(near + 1, 1.1 * near)


def test_a_limit_of_memory_ends_a_size_that_needs_more(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = run(
        "largest_model.py", "--only", "trilithon-3-disk", "--limit-gib", 1.5, "--width", 64, "--vocabulary", 128,
        "--tokens", 8, "--most-millions", 0.2, "--steps", 1, "--path", tmp_path, "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = rows_of(out)
    assert row["bounded_by"] == "size tried" and 0.1e6 < row["parameters"] < 0.2e6 and row["peak_resident_mib"] > 50
    assert list(tmp_path.iterdir()) == [out], "nothing is left behind"
