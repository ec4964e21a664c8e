"""Both sides run for real, on ranks forked from the warm server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trilithon.compare import Outcome, as_text, compare
from trilithon.compare.side import run_job
from trilithon.errors import ConfigError
from trilithon.testing import run_ranks

EXAMPLE = Path(__file__).parents[3] / "examples" / "compare_script.py"

FAULTY = """
import runpy
import torch.distributed as dist
names = runpy.run_path({example!r})
batches, loss = names["batches"], names["loss"]
def build():
    model = names["build"]()
    if {condition}:
        model[3].weight.register_hook(lambda gradient: gradient * 1.01)
    return model
"""


def forked(module: str, arguments, nproc: int, *, timeout_s: float) -> None:
    assert module == "trilithon.compare.side"
    if nproc == 1:
        run_job(Path(arguments[0]))
    else:
        run_ranks(run_job, nproc, Path(arguments[0]), timeout_s=timeout_s)


def config(tmp_path: Path, name: str, **settings) -> str:
    path = tmp_path / name
    path.write_text(json.dumps({"optimizer": {"kind": "adamw", "lr": 1e-3}, **settings}))
    return str(path)


def outcome(a: str, b: str, script: Path = EXAMPLE, *, steps: int = 2, nproc: int = 2) -> Outcome:
    return compare(a, b, script, steps=steps, nproc=nproc, timeout_s=60, runner=forked)


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("nproc", [2, 3])
def test_every_stage_agrees_with_plain_torch_under_clipping_and_accumulation(tmp_path, zero_stage, nproc):
    ours = config(tmp_path, "a.json", zero={"stage": zero_stage}, clip_norm=0.5, batch={"accumulation": 2})
    found = outcome("plain", ours, nproc=nproc)
    assert found.agree, as_text(found)
    names = [d.name for d in found.differences if d.kind == "parameter" and d.step == 2]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]


def test_a_schedule_is_followed_by_the_plain_side(tmp_path):
    schedule = {"kind": "warmup_lr", "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}
    found = outcome(config(tmp_path, "a.json", lr_schedule=schedule), "plain", steps=3)
    assert found.agree, as_text(found)
    moved = [d for d in found.differences if d.kind == "parameter" and d.step == 3]
    assert moved and all(d.allowed < 1e-4 for d in moved)  # a rate of 1e-3 instead would be found


def test_a_wrong_rate_is_found_in_the_parameters(tmp_path):
    other = config(tmp_path, "b.json", optimizer={"kind": "adamw", "lr": 1.01e-3})
    found = outcome(config(tmp_path, "a.json"), other, nproc=1)
    assert not found.agree
    assert (found.first_beyond.step, found.first_beyond.kind, found.first_beyond.name) == (1, "parameter", "0.weight")
    assert found.first_beyond.max_abs == pytest.approx(1e-5, rel=0.05)  # 1 % of Adam's first step, which is lr


def test_a_wrong_gradient_is_named(tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(example=str(EXAMPLE), condition="dist.is_initialized()"))
    found = outcome("plain", config(tmp_path, "a.json", zero={"stage": 1}), script, steps=1)
    assert found.first_beyond.kind == "grad_norm"
    assert (found.most_beyond.kind, found.most_beyond.name) == ("gradient", "3.weight")
    assert found.most_beyond.max_rel == pytest.approx(0.01, rel=0.01)
    wrong = [d.name for d in found.differences if d.kind == "gradient" and not d.is_rounding]
    assert wrong == ["3.weight"]


def test_bf16_differs_from_the_first_loss_on_and_by_rounding_only(tmp_path):
    found = outcome(config(tmp_path, "a.json"), config(tmp_path, "b.json", precision="bf16"), nproc=1)
    assert (found.first.step, found.first.kind, found.dtype) == (1, "loss", "bf16")
    assert found.agree, as_text(found)


def test_a_step_skipped_by_one_side_is_told_as_such(tmp_path):
    scaled = config(tmp_path, "a.json", precision={"kind": "fp16", "initial_scale_power": 24})
    found = outcome(scaled, "plain", steps=1)
    assert (found.first_beyond.kind, found.first_beyond.name) == ("update", "skipped on side A")


def test_different_accumulation_is_refused(tmp_path):
    one, two = config(tmp_path, "one.json"), config(tmp_path, "two.json", batch={"accumulation": 2})
    with pytest.raises(ConfigError, match="their steps see different data"):
        outcome(one, two)


@pytest.mark.parametrize("steps, nproc", [(0, 1), (1, 0)])
def test_nothing_to_do_is_refused(tmp_path, steps, nproc):
    with pytest.raises(ConfigError, match="must be at least 1"):
        outcome("plain", config(tmp_path, "a.json"), steps=steps, nproc=nproc)
