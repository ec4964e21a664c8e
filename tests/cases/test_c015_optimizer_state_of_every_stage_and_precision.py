"""Moments and step counts after a load equal those of the run that saved, for every stage and precision."""

import pytest

import trilithon
from saved_runs import OddNet, batches, everything, settings, train
from trilithon.testing import ranks


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_all_of_it_comes_back_bit_for_bit(precision, tmp_path):
    for stage in (0, 1, 2, 3):
        with trilithon.initialize(OddNet(), settings(stage, precision)) as engine:
            train(engine, batches(5))
            engine.save(tmp_path / str(stage))
            held = everything(engine)
        with trilithon.initialize(OddNet(seed=8), settings(stage, precision)) as engine:
            report = engine.load(tmp_path / str(stage))
            assert everything(engine) == held
            assert report.counts()["restored"]["exp_avg"] == report.counts()["restored"]["exp_avg_sq"] == 10
            assert engine._update.state_dict()["updates"] == engine.steps > 0
