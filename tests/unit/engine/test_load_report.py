"""What a load says and refuses: strict by default, nothing is changed by what is refused, and there is a way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import trilithon
from saved_runs import ADAM, OddNet, batches, everything, settings, train
from trilithon.errors import CheckpointError, ProtocolError


def engine_of(model: nn.Module | None = None, **changes) -> trilithon.Engine:
    return trilithon.initialize(model or OddNet(seed=4), settings(1, **changes))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    engine = engine_of(OddNet())
    train(engine, batches(3))
    engine.save(folder, client_state={"tokens": 12})
    engine.save(folder, "weights-of-an-engine-without-optimizer")
    plain = trilithon.initialize(OddNet(seed=1), {"precision": "bf16"})
    plain.save(folder, "no-optimizer")
    (folder / "latest").write_text("step-00000003\n")
    return folder


def widened(seed: int = 4) -> OddNet:
    model = OddNet(seed)
    model.last = nn.Linear(12, 5)
    return model


def with_more(seed: int = 4) -> OddNet:
    model = OddNet(seed)
    model.extra = nn.Linear(2, 2)
    return model


def with_less(seed: int = 4) -> OddNet:
    model = OddNet(seed)
    del model.rare, model.mean
    return model


def test_the_report_counts_and_names_everything(saved):
    engine = engine_of()
    report = engine.load(saved)
    assert (report.step, report.tag, report.client_state) == (3, "step-00000003", {"tokens": 12})
    assert report.counts()["restored"] == {
        "weights": 13,
        "buffers": 2,
        "exp_avg": 10,
        "exp_avg_sq": 10,
        "schedule": 1,
        "scaler": 1,
        "counters": 1,
        "random": 1,
    }
    assert report.counts()["initialised"] == {}
    assert report.counts()["ignored"] == {}
    assert "shared.weight" in report.restored["weights"]
    assert "same.weight" not in report.restored["weights"]
    assert "restored: weights 13, buffers 2" in str(report)


REFUSED = {
    "a shape changed": (widened, {}, r"weights: 'last.weight' is \[5, 12\] here and \[4, 12\] in the checkpoint"),
    "a parameter is new": (with_more, {}, r"weights: 'extra.weight' \[2, 2\] is not in the checkpoint"),
    "a parameter is gone": (
        with_less,
        {},
        r"weights: 'rare.weight' \[12, 12\] is in the checkpoint and not in the model",
    ),
    "a buffer is gone": (with_less, {}, r"buffers: 'mean' \[12\] is in the checkpoint and not in the model"),
    "another rule": (
        OddNet,
        {"optimizer": {"kind": "lion", "lr": 0.1}},
        r"written by rule 'adamw' and this run has 'lion'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(case, saved):
    make, changes, message = REFUSED[case]
    engine = engine_of(make(), **changes)
    fields = () if "optimizer" in changes else ("exp_avg", "exp_avg_sq")
    before = everything(engine, fields)
    with pytest.raises(CheckpointError, match=message) as refusal:
        engine.load(saved)
    assert "nothing was changed" in str(refusal.value)
    assert "strict=False" in str(refusal.value)
    assert everything(engine, fields) == before
    report = engine.load(saved, strict=False)
    assert any(message.split(":")[0].strip("r'") in note for note in report.notes)
    assert engine.steps == 3


def test_strict_false_restores_what_fits_and_reports_the_rest(saved):
    engine = engine_of(widened())
    head = dict(engine.full_parameters())["last.weight"]
    report = engine.load(saved, strict=False)
    assert report.initialised["weights"] == ["last.weight", "last.bias"]
    assert report.initialised["exp_avg"] == ["last.bias", "last.weight"]
    assert report.ignored["exp_avg"] == ["last.weight", "last.bias"]
    other = engine_of()
    other.load(saved)
    mine, theirs = dict(engine.full_parameters()), dict(other.full_parameters())
    assert torch.equal(mine["last.weight"], head)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine if not name.startswith("last."))
    missed = engine._update.state_dict()["missed"]
    assert missed["last.bias"] == 3, "its moments begin at zero, and so does the correction of their bias"
    assert "first.bias" not in missed


def test_missing_optimizer_state_says_which_flag_accepts_it(saved):
    engine = engine_of()
    with pytest.raises(CheckpointError, match=r"holds no optimizer state .*parts=\('weights',\)"):
        engine.load(saved, "no-optimizer")
    report = engine.load(saved, "no-optimizer", parts=("weights",))
    assert len(report.restored["weights"]) == 13
    assert engine.steps == 0


def test_an_engine_without_optimizer_takes_the_weights(saved):
    engine = trilithon.initialize(OddNet(seed=4), {"precision": "bf16"})
    report = engine.load(saved)
    assert len(report.restored["weights"]) == 13
    reference = engine_of()
    reference.load(saved)
    mine, theirs = engine.state_dict(), reference.state_dict()
    assert all(torch.equal(mine[name], theirs[name].to(mine[name].dtype)) for name in theirs)


def test_unknown_parts_are_refused(saved):
    with pytest.raises(CheckpointError, match=r"parts=\['moments'\]: there are weights, optimizer"):
        engine_of().load(saved, parts=("moments",))


ADAMS = [({"kind": "adamw", "lr": 0.1}, "adamw"), ({"kind": "adam", "lr": 0.1}, "adam")]


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_adam_and_adamw_are_two_rules_whose_state_is_the_same(first, second, tmp_path):
    (written, was), (other, here) = ADAMS[first], ADAMS[second]
    engine = engine_of(OddNet(), optimizer=written)
    train(engine, batches(2))
    engine.save(tmp_path)
    moments = dict(engine.view("exp_avg"))
    engine = engine_of(optimizer=other)
    message = f"written by rule '{was}' and this run has '{here}', .* decays weights differently .strict=False accepts"
    with pytest.raises(CheckpointError, match=message):
        engine.load(tmp_path)
    report = engine.load(tmp_path, strict=False)
    assert any(f"'{was}'" in note and f"'{here}'" in note for note in report.notes)
    assert engine._update.state_dict()["rule"] == here
    for name, value in engine.view("exp_avg"):
        assert torch.equal(value, moments[name])


def test_a_torch_optimizer_has_the_rule_that_it_follows(tmp_path):
    for make, rule in [
        (torch.optim.Adam, "adam"),
        (torch.optim.AdamW, "adamw"),
        (lambda p: torch.optim.Adam(p, decoupled_weight_decay=True), "adamw"),
    ]:
        model = nn.Linear(3, 3)
        engine = trilithon.initialize(model, optimizer=make(model.parameters()))
        assert engine._update.state_dict()["rule"] == rule
        engine.save(tmp_path, rule)
    model = nn.Linear(3, 3)
    engine = trilithon.initialize(model, optimizer=torch.optim.AdamW(model.parameters(), weight_decay=0.5))
    engine.load(tmp_path, "adam", strict=False)
    (group,) = engine._groups
    assert group["weight_decay"] == 0 and group["decoupled_weight_decay"] is True  # its amount, this run's way


def test_arguments_that_cannot_be_meant_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = engine_of()
    (tmp_path / "afile").write_text("x")
    for call, message in [
        (lambda: engine.save("folder", 5), r"tag=5 \(int\) cannot name a checkpoint"),
        (lambda: engine.save(""), "folder='' names no folder"),
        (lambda: engine.save(None), "folder=None is of type NoneType"),
        (lambda: engine.load("folder", 5), r"tag=5 \(int\) cannot name a checkpoint"),
        (lambda: engine.load(""), "folder='' names no folder"),
        (lambda: engine.load("afile"), "afile is a file"),
        (lambda: engine.load("nothing"), "nothing does not exist"),
        (lambda: engine.load("afile", parts=5), r"parts=\[5\]: there are weights"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]


def test_the_only_checkpoint_names_its_damage_with_and_without_a_pointer(tmp_path):
    engine = engine_of()
    state = engine.save(tmp_path) / "state.json"
    state.unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"none that is complete\..* {state} is missing"):
            engine.load(tmp_path)
        (tmp_path / "latest").unlink(missing_ok=True)


def test_settings_of_groups_come_back_by_name(tmp_path):
    def build(order, decay):
        model = OddNet()
        named = dict(model.named_parameters())
        firsts = [p for n, p in named.items() if n.startswith("first")]
        others = [p for n, p in named.items() if not n.startswith("first") and p.requires_grad]
        groups = [{"params": firsts, "weight_decay": decay}, {"params": others, "betas": (0.5, 0.9)}]
        return trilithon.initialize(model, {"optimizer": ADAM}, parameters=groups[::order])

    build(1, 0.25).save(tmp_path)
    engine = build(-1, 0.5)
    engine.load(tmp_path)
    assert engine._groups[1]["weight_decay"] == 0.25
    assert engine._groups[0]["betas"] == (0.5, 0.9)
    engine = build(-1, 0.5)
    engine.load(tmp_path, parts=("weights", "schedule"))
    assert engine._groups[1]["weight_decay"] == 0.5
    one_group = trilithon.initialize(OddNet(), {"optimizer": ADAM})
    with pytest.raises(CheckpointError, match="the parameters of group 0 were in groups with different settings"):
        one_group.load(tmp_path)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state) -> None:
        self.count = state["count"]

    def on_step(self, step: int) -> None:
        self.count += 1


def test_registered_objects_and_hooks_go_with_the_run(tmp_path):
    engine = engine_of(OddNet())
    engine.stateful["mine"], hook = Counter(), Counter()
    engine.hooks.append(hook)
    engine.stateful["mine"].count = 7
    train(engine, batches(2))
    engine.save(tmp_path)
    other = engine_of()
    with pytest.raises(CheckpointError, match="stateful: 'hook/Counter' was saved, and no object or hook of that name"):
        other.load(tmp_path)
    other.stateful["mine"] = Counter()
    other.hooks.append(Counter())
    other.load(tmp_path)
    assert other.stateful["mine"].count == 7
    assert other.hooks[-1].count == 2
    other.stateful["new"] = Counter()
    with pytest.raises(CheckpointError, match="'new' is registered here and was not when the checkpoint was saved"):
        other.load(tmp_path)


def test_what_is_not_plain_data_is_refused_before_anything_is_written(tmp_path):
    engine = engine_of()
    with pytest.raises(CheckpointError, match=r"client_state.model is a .*OddNet"):
        engine.save(tmp_path / "new", client_state={"model": OddNet()})
    with pytest.raises(CheckpointError, match="pass a dictionary"):
        engine.save(tmp_path / "new", client_state=[1])
    assert not (tmp_path / "new").exists()


def test_damage_found_halfway_stops_training_until_a_whole_checkpoint_is_loaded(saved, tmp_path):
    engine = engine_of(OddNet())
    path = engine.save(tmp_path, "damaged")
    engine.save(tmp_path, "whole")
    data = next(path.glob("*.safetensors"))
    raw = bytearray(data.read_bytes())
    raw[-3] ^= 4
    data.write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"{data.name} is damaged"):
        engine.load(tmp_path, "damaged")
    with pytest.raises(ProtocolError, match="failed halfway, so the engine holds a mixture"):
        train(engine, batches(1))
    engine.load(tmp_path, "whole")
    train(engine, batches(1))


def test_a_window_does_not_fit_another_accumulation(tmp_path):
    engine = engine_of(OddNet(), accumulation=3)
    engine.backward(engine(*batches(1)[0][0]))
    engine.save(tmp_path)
    other = engine_of(OddNet(), accumulation=2)
    with pytest.raises(
        CheckpointError, match=r"saved after 1 of 3 micro-batches on 1 ranks.*leave 'window' out of parts"
    ):
        other.load(tmp_path)
    report = other.load(tmp_path, parts=("weights", "optimizer", "schedule", "scaler", "counters"))
    assert report.ignored["window"] == ["1 micro-batches"]
    with pytest.raises(ProtocolError, match="without a backward"):
        other.step()


def test_the_checkpoint_that_was_loaded_is_kept(tmp_path):
    engine = engine_of(OddNet())
    for tag in ("a", "b", "c"):
        engine.save(tmp_path, tag)
    run = engine_of(checkpoints={"keep": 1})
    run.load(tmp_path, "b")
    run.save(tmp_path, "d")
    run.save(tmp_path, "e")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "e", "latest"]


def test_weights_alone_refresh_what_the_optimizer_works_on(saved):
    """Otherwise the first step would bring the weights from before the load back."""
    for precision in ("bf16", "fp16"):
        engine = engine_of(precision=precision, optimizer={**ADAM, "lr": 0.0, "weight_decay": 0.0}, lr_schedule=None)
        engine.load(saved, parts=("weights",))
        loaded = engine.state_dict()
        engine._precision._scale = 1.0
        train(engine, batches(1))
        assert engine.steps == 1
        after = engine.state_dict()
        assert all(torch.equal(after[n], loaded[n]) for n in loaded if n not in ("seen", "mean"))


SCRIPT = """
import sys, torch, trilithon
from torch import nn
engine = trilithon.initialize(nn.Linear(300, 300), {"optimizer": "adamw"})
engine.save(sys.argv[1], "made in the background", blocking=False)
"""


def test_a_program_that_ends_writes_out_what_it_began(tmp_path):
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], check=True, timeout=60)
    assert (tmp_path / "latest").read_text() == "made in the background\n"
    trilithon.initialize(nn.Linear(300, 300), {"optimizer": "adamw"}).load(tmp_path)


def test_close_raises_what_the_background_failed_with(tmp_path, monkeypatch):
    def fails(descriptor: int, path: Path) -> None:
        raise CheckpointError(f"{path} cannot be written: the disk is gone.")

    engine = engine_of(OddNet())
    monkeypatch.setattr("trilithon.checkpoint.durable.sync", fails)
    engine.save(tmp_path, blocking=False)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        engine.close()
    assert [path.name for path in tmp_path.iterdir()] == []


def test_progress_and_the_report_of_a_save(tmp_path):
    engine = engine_of(OddNet())
    assert engine.saving is None
    assert engine.last_save is None
    path = engine.save(tmp_path, blocking=False)
    engine.close()
    report = engine.last_save
    assert (report.path, report.step) == (path, 0)
    assert 0 < report.blocked_s <= report.seconds
    assert report.bytes == sum(file.stat().st_size for file in path.iterdir() if file.name != "MANIFEST.json")
