"""Training after a resume is the training that was never interrupted, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import trilithon
from saved_runs import ADAM, OddNet, batches, everything, settings, train
from trilithon.errors import CheckpointError
from trilithon.testing import ranks
from trilithon.testing.parity import rank_part


def scramble() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(999)


def start(rank_seed: int) -> None:
    random.seed(rank_seed)
    np.random.seed(rank_seed)
    torch.manual_seed(rank_seed)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_stage_goes_on_bit_for_bit(precision, tmp_path):
    data = batches(6, accumulation=3)
    for stage in (0, 1, 2, 3):
        folder = tmp_path / str(stage)
        start(stage)
        with trilithon.initialize(OddNet(), settings(stage, precision, 3)) as engine:
            start(100 + engine.rank)
            train(engine, data[:3])
            engine.save(folder, client_state={"note": ("a", 1)})
            losses, drawn = train(engine, data[3:]), draws()
            whole = everything(engine)
            steps, skipped = engine.steps, engine.skipped_steps
        scramble()
        with trilithon.initialize(OddNet(seed=5), settings(stage, precision, 3)) as engine:
            report = engine.load(folder)
            assert report.client_state == {"note": ("a", 1)}
            assert report.initialised == {}
            assert report.ignored == {}
            assert train(engine, data[3:]) == losses
            assert draws() == drawn
            assert everything(engine) == whole
        assert (skipped > 0) == (precision == "fp16"), "fp16 shall have met overflows"
        assert steps + skipped == 6
        assert steps > 2


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_open_accumulation_window_goes_on_bit_for_bit(stage, tmp_path):
    """Saved after two of three micro-batches; in the second round the first of them was not reduced (`no_sync`)."""

    def micro(engine, batch, synced=True):
        part = rank_part(batch, engine.rank, engine.world_size)
        if synced:
            engine.backward(engine(*part))
        else:
            with engine.no_sync():
                engine.backward(engine(*part))

    data = batches(4, accumulation=3)
    for synced in (True, False):
        folder = tmp_path / str(synced)
        start(1)
        with trilithon.initialize(OddNet(), settings(stage, "bf16", 3)) as engine:
            train(engine, data[:1])
            micro(engine, data[1][0], synced)
            micro(engine, data[1][1])
            engine.save(folder)
            micro(engine, data[1][2])
            engine.step()
            losses = [engine.loss, *train(engine, data[2:])]
            whole = everything(engine)
        scramble()
        with trilithon.initialize(OddNet(seed=5), settings(stage, "bf16", 3)) as engine:
            train(engine, data[:2])  # and an open window of its own, which the load forgets
            micro(engine, data[3][0])
            report = engine.load(folder)
            assert report.restored["window"] == ["2 micro-batches"]
            micro(engine, data[1][2])
            engine.step()
            assert [engine.loss, *train(engine, data[2:])] == losses
            assert everything(engine) == whole


@ranks(2)
def test_saved_in_the_background_while_training_goes_on(tmp_path):
    """The files hold the values from when `save` returned."""
    data = batches(6)
    for stage in (0, 3):
        folder = tmp_path / str(stage)
        with trilithon.initialize(OddNet(), settings(stage, "bf16")) as engine:
            train(engine, data[:3])
            before = everything(engine)
            path = engine.save(folder, blocking=False)
            losses = train(engine, data[3:5])
            second = engine.save(folder, blocking=False)  # waits for the first
            assert (folder / path.name / "MANIFEST.json").is_file()
            assert engine.last_save.path == path
            losses += train(engine, data[5:])
        assert (folder / "latest").read_text().strip() == second.name, "close writes out what was begun"
        with trilithon.initialize(OddNet(seed=5), settings(stage, "bf16")) as engine:
            engine.load(folder, path.name)
            assert everything(engine) == before
            assert train(engine, data[3:]) == losses


def failing_disk(*args, **kwargs):
    from trilithon.checkpoint.durable import cannot_write

    raise cannot_write(args[-1], OSError(28, "No space left on device"))


@ranks(2)
def test_a_failure_in_the_background_is_raised_by_all_ranks_at_one_step(tmp_path, monkeypatch):
    data = batches(60)
    with trilithon.initialize(OddNet(), settings(2)) as engine:
        train(engine, data[:1])
        engine.save(tmp_path, "good")
        if engine.rank == 1:
            monkeypatch.setattr("trilithon.checkpoint.durable.sync", failing_disk)
        engine.save(tmp_path, "bad", blocking=False)
        raised_at = None
        for number, step in enumerate(data[1:]):
            try:
                train(engine, [step])
            except trilithon.CheckpointError as error:
                assert "rank 1" in str(error)
                assert "No space left" in str(error)
                raised_at = number
                assert engine.step(), "the step that was interrupted can be made up for"
                break
        assert engine._sharding.exchange(raised_at, "compare") == [raised_at] * 2
        assert raised_at is not None
        monkeypatch.undo()
        engine.save(tmp_path, "after")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "good", "latest"]


@ranks(1, 2)
def test_save_and_load_in_any_order_in_one_process(tmp_path, world_size):
    """Before any step too, and the second checkpoint holds what the first does."""
    data = batches(2)
    for stage in (0, 1, 2, 3):
        here = tmp_path / str(stage)
        with trilithon.initialize(OddNet(), settings(stage, "bf16")) as engine:
            fresh = everything(engine)
            engine.save(here / "a")
            engine.load(here / "a")
            engine.load(here / "a")
            engine.save(here / "b")
            engine.save(here / "b")
            assert everything(engine) == fresh
            losses = train(engine, data)
            trained = everything(engine)
            engine.load(here / "b")
            assert everything(engine) == fresh
            engine.eval_step(rank_part(data[0][0], engine.rank, engine.world_size))
            engine.load(here / "b")
            torch.manual_seed(0)
            engine.save(here / "c")
            engine.load(here / "b")
            assert train(engine, data) == losses
            assert everything(engine) == trained


@ranks(2)
def test_another_optimizer_class_and_schedule_go_on_bit_for_bit(tmp_path):
    """Someone else's optimizer and torch's own scheduler; rates and decay differ between groups."""
    data = batches(6)

    def build(stage, seed, kind):
        model = OddNet(seed)
        decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        rest = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
        optimizer = kind([{"params": decayed, "lr": 0.01, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}])
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.04], total_steps=20)
        given = settings(stage)
        del given["optimizer"], given["lr_schedule"]
        return trilithon.initialize(model, given, optimizer, schedule)

    def fields(engine):
        return {"lr": engine.lr, **{f: digest for f, digest in everything(engine, ()).items() if f != "update"}}

    for kind in (torch.optim.Adam, torch.optim.NAdam):
        for stage in (0, 2):
            folder = tmp_path / f"{kind.__name__}{stage}"
            torch.manual_seed(3)
            with build(stage, 0, kind) as engine:
                engine.save(folder, "before the first step")
                train(engine, data[:3])
                engine.save(folder)
                losses, whole = train(engine, data[3:]), fields(engine)
            scramble()
            with build(stage, 5, kind) as engine:
                engine.load(folder, "before the first step")
                engine.load(folder)
                assert train(engine, data[3:]) == losses
                assert fields(engine) == whole


@ranks(2)
def test_states_of_another_optimizer_move_between_whole_and_cut_parameters(tmp_path):
    """Stage 0 runs it on whole parameters, the others on slices."""
    data = batches(6)

    def build(stage, seed):
        model = OddNet(seed).eval()  # without dropout, whose draws would differ
        given = settings(stage)
        del given["optimizer"], given["lr_schedule"]
        engine = trilithon.initialize(model, given, lambda p: torch.optim.NAdam(p, lr=0.01))
        return engine

    runs = {}
    for stage in (0, 2):
        with build(stage, 0) as engine:
            train(engine, data[:3])
            engine.save(tmp_path / str(stage))
            runs[stage] = train(engine, data[3:])
    for source, target in ((0, 2), (2, 0)):
        with build(target, 5) as engine:
            engine.load(tmp_path / str(source))
            assert train(engine, data[3:]) == pytest.approx(runs[source], rel=1e-5)


class HalfUsed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.idle = torch.nn.Parameter(torch.ones(3))
        self.used = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.used * x).sum()


@ranks(4)
def test_who_sat_out_is_known_on_all_ranks_after_a_load(tmp_path):
    """Two tiny parameters on four ranks: ranks 2 and 3 have no slice, so nobody told them."""
    given = {"zero": {"stage": 1}, "optimizer": ADAM}
    with trilithon.initialize(HalfUsed(), given) as engine:
        for _ in range(2):
            engine.train_step([torch.ones(3)])
        assert engine._sharding.exchange(len(engine._sharding.slices()), "slices") == [1, 1, 0, 0]
        engine.save(tmp_path)
    with trilithon.initialize(HalfUsed(), given) as engine:
        engine.load(tmp_path)
        assert engine._update.state_dict()["missed"] == {"idle": 2}


@ranks(2)
def test_ranks_that_ask_for_different_things_are_all_refused(tmp_path):
    with trilithon.initialize(OddNet(), settings(1, "fp32", 1)) as engine:
        train(engine, batches(2))
        engine.save(tmp_path / "run", "a")
        engine.save(tmp_path / "run", "b")
    with trilithon.initialize(OddNet(seed=5), settings(1, "fp32", 1)) as engine:
        rank, before = engine.rank, everything(engine)
        run = tmp_path / "run"
        weights = ("weights",)
        for mine, message in [
            (
                {"parts": (None, weights)[rank]},
                r"different parts \(rank 0: \['weights', 'optim.*; rank 1: \['weights'\]",
            ),
            ({"strict": rank == 0}, r"different strict \(rank 0: True; rank 1: False\)"),
            ({"folder": (run, tmp_path / "no")[rank]}, r"different folder \(rank 0: .*/run; rank 1: .*/no\)"),
            ({"tag": ("a", "b")[rank]}, r"different tag \(rank 0: 'a'; rank 1: 'b'\)"),
            ({"tag": ("a", 5)[rank]}, r"^rank 1: tag=5 \(int\) cannot name"),
            ({"parts": (None, ("moments",))[rank]}, r"^rank 1: parts=\['moments'\]: there are"),
        ]:
            with pytest.raises(CheckpointError, match=message):
                engine.load(**{"folder": run, **mine})
            assert everything(engine) == before
        for mine, message in [
            ({"tag": ("c", 5)[rank]}, r"^rank 1: tag=5"),
            ({"folder": ("", run)[rank]}, r"^rank 0: folder='' names no folder"),
            ({"client_state": ({}, [])[rank]}, r"^rank 1: client_state is a list"),
            ({"tag": ("c", "d")[rank]}, r"different tag \(rank 0: 'c'; rank 1: 'd'\)"),
            ({"blocking": rank == 0}, r"different blocking"),
        ]:
            with pytest.raises(CheckpointError, match=message):
                engine.save(**{"folder": run, **mine})
        report = engine.load(
            run, ("latest", None)[rank], parts=[("weights", "optimizer"), ("optimizer", "weights")][rank]
        )
        assert report.tag == "b"  # the order of parts and the two names of the newest make no difference
