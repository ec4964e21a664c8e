from __future__ import annotations

import json
import math

import pytest
import torch

from trilithon.compare import Outcome, as_json, as_text
from trilithon.compare.difference import FACTOR, Yardstick, differences, largest_difference
from trilithon.compare.record import StepRecord, grad_norm

UNIT = 2.0**-24


def record(loss=1.0, changed=True, gradient=(3.0, 4.0), parameter=(1.0, 2.0), name="w"):
    return StepRecord(loss, changed, [0.1], {name: torch.tensor(gradient)}, {name: torch.tensor(parameter)})


def outcome(tmp_path, a, b, *, perturbed=None, steps=1):
    for folder, content in (("a", a), ("b", b), ("base", a), ("moved", perturbed or a)):
        for step in range(1, steps + 1):
            content.write(tmp_path / folder, step)
    paths = [tmp_path / folder for folder in ("a", "b", "base", "moved")]
    found = differences(paths[0], paths[1], steps, Yardstick(paths[2], paths[3:], UNIT))
    return Outcome("a.json", "b.json", steps, 2, "fp32", tuple(found))


def test_records_are_read_back_as_written(tmp_path):
    record(loss=0.1, changed=False).write(tmp_path / "x", 7)
    back = StepRecord.read(tmp_path / "x", 7)
    assert (back.loss, back.changed, back.lr) == (0.1, False, [0.1])
    assert torch.equal(back.gradients["w"], torch.tensor([3.0, 4.0]))
    assert grad_norm(back) == 5.0


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.inf, -math.inf], [math.inf, -math.inf], 0.0),
        ([math.inf], [-math.inf], math.inf),
        ([math.nan], [1.0], math.inf),
        ([math.inf], [1.0], math.inf),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_largest_difference_counts_what_is_not_finite(a, b, expected):
    assert largest_difference(torch.tensor(a), torch.tensor(b)) == expected


def test_equal_runs_have_no_first_difference(tmp_path):
    found = outcome(tmp_path, record(), record(), steps=2)
    assert found.first is None and found.agree
    assert [(d.step, d.kind) for d in found.differences][:4] == [
        (1, "loss"), (1, "grad_norm"), (1, "gradient"), (1, "parameter"),
    ]  # fmt: skip
    assert "equal bit for bit" in as_text(found)


def test_a_difference_of_one_rounding_is_named_and_allowed(tmp_path):
    next_up = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0)).item()
    found = outcome(tmp_path, record(), record(parameter=(1.0, next_up)))
    assert found.agree
    assert (found.first.kind, found.first.name, found.first.max_abs) == ("parameter", "w", next_up - 2.0)
    assert found.first.allowed == FACTOR * UNIT * 2.0
    assert as_text(found).splitlines()[-1] == "verdict: A and B agree within rounding"


def test_beyond_rounding_is_told_in_the_order_loss_norm_gradient_parameter(tmp_path):
    found = outcome(tmp_path, record(), record(gradient=(3.0, 4.1), parameter=(1.0, 2.1)))
    assert not found.agree
    assert found.first_beyond.kind == "grad_norm"
    assert (found.most_beyond.kind, found.most_beyond.name) == ("gradient", "w")
    assert found.most_beyond.max_abs == pytest.approx(0.1, rel=1e-6)
    assert found.most_beyond.max_rel == pytest.approx(0.1 / 4, rel=1e-6)
    text = as_text(found)
    assert "DIFFER, first in step 1, the gradient norm" in text
    assert "farthest apart in that step: step 1, the gradient of w" in text


def test_what_rounding_amplifies_is_allowed(tmp_path):
    moved = record(parameter=(1.0, 2.01))
    assert outcome(tmp_path, record(), record(parameter=(1.0, 2.05)), perturbed=moved).agree  # 5 times as far
    assert not outcome(tmp_path, record(), record(parameter=(1.0, 2.1)), perturbed=moved).agree  # 10 times


def test_a_skipped_update_is_the_first_difference(tmp_path):
    found = outcome(tmp_path, record(), record(changed=False, gradient=(math.inf, 1.0)))
    assert (found.first_beyond.kind, found.first_beyond.name) == ("update", "skipped on side B")
    assert "skipped on side B" in as_text(found)


def test_a_tensor_on_one_side_only_is_named(tmp_path):
    found = outcome(tmp_path, record(), record(name="v"))
    names = [d.name for d in found.differences if d.kind == "parameter"]
    assert names == ["w (only on side A)", "v (only on side B)"]


def test_json_has_no_infinity(tmp_path):
    found = outcome(tmp_path, record(), record(gradient=(math.nan, 1.0)))
    told = json.loads(as_json(found), parse_constant=pytest.fail)
    assert told["agree"] is False
    assert told["first"]["kind"] == "grad_norm" and told["first"]["max_abs"] is None
