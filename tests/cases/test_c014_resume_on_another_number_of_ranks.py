"""Three Adam steps on two ranks, then on four and on one with the same global batches: the losses of a straight run."""

import pytest

import trilithon
from saved_runs import OddNet, batches, settings, train
from trilithon.testing import run_ranks
from trilithon.testing.tolerance import tolerance


def net():
    return OddNet(2).eval()


def straight_and_saved(folder):
    losses = {}
    for stage in (1, 2, 3):
        with trilithon.initialize(net(), settings(stage)) as engine:
            train(engine, batches(6)[:3])
            engine.save(f"{folder}/{stage}")
            losses[stage] = train(engine, batches(6)[3:])
    return losses


def resumed(folder, losses):
    for stage in (1, 2, 3):
        with trilithon.initialize(net(), settings(stage)) as engine:
            report = engine.load(f"{folder}/{stage}")
            assert any(f"do not fit {engine.world_size}" in note for note in report.notes)
            mine = train(engine, batches(6)[3:])
            assert mine == pytest.approx(losses[stage], rel=0, abs=tolerance("fp32", steps=3).loss)


def test_no_conversion_between_two_four_and_one(tmp_path):
    losses = run_ranks(straight_and_saved, 2, str(tmp_path))[0]
    for world_size in (4, 1):
        run_ranks(resumed, world_size, str(tmp_path), losses)
