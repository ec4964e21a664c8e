"""The benchmarks of experts run at toy size and say what they measured."""

import pytest
from test_benchmarks import rows_of, run


def test_a_layer_beside_a_dense_block(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = run("moe_layer.py", "--tokens", 64, "--hidden", 16, "--repeats", 1, "--out", out)
    assert done.returncode == 0, done.stderr
    rows = {row["layer"]: row for row in rows_of(out)}
    assert {"dense", "ours, capacity 1", "ours, dropless", "einsum with masks"} <= set(rows)
    assert rows["dense"]["over_dense"] == 1.0
    for name in ("ours, capacity 1", "ours, dropless"):  # what is kept for backward is linear in tokens
        assert rows[name]["kept_growth_when_tokens_double"] == pytest.approx(2, abs=0.1)
    assert rows["einsum with masks"]["kept_growth_when_tokens_double"] > 2.2


def test_students_with_and_without_a_teacher(tmp_path):
    (tmp_path / "text.txt").write_text("some text to learn from, again and again. " * 60)
    out = tmp_path / "rows.jsonl"
    done = run(
        "mixture_of_students.py", "--data", tmp_path / "text.txt", "--steps", 3, "--seeds", 1, "--width", 16,
        "--context", 16, "--rows", 2, "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(out)
    assert row["student_parameters"] < row["teacher_parameters"]
    assert row["alone"] != row["teacher, then alone"] != row["teacher to the end"]
