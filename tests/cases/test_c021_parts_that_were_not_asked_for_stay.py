"""Optimizer off, schedule off, both off, from a run with other settings: exactly what was asked for changes."""

import torch

import trilithon
from saved_runs import ADAM, OddNet, batches, fields_of, settings, train
from trilithon.testing import ranks

HERE = {"kind": "adamw", "lr": 0.5, "weight_decay": 0.0, "betas": (0.5, 0.6)}


@ranks(2)
def test_rates_and_decay_stay_those_of_the_new_run(tmp_path):
    for stage in (0, 1, 2, 3):
        folder = tmp_path / str(stage)
        saved_with = settings(stage, lr_schedule=None)
        with trilithon.initialize(OddNet(), saved_with) as engine:
            train(engine, batches(3))
            engine.save(folder)
            held = fields_of(engine)
        for optimizer in (True, False):
            for schedule in (True, False):
                parts = ["weights", *["optimizer"] * optimizer, *["schedule"] * schedule]
                with trilithon.initialize(OddNet(seed=5), {**saved_with, "optimizer": HERE}) as engine:
                    report = engine.load(folder, parts=parts)
                    group, mine = engine._groups[0], fields_of(engine)
                    assert engine.lr == [ADAM["lr"] if schedule else HERE["lr"]]
                    assert group["weight_decay"] == (ADAM["weight_decay"] if optimizer else HERE["weight_decay"])
                    assert group["betas"] == ((0.9, 0.999) if optimizer else HERE["betas"])
                    assert engine._update.state_dict()["updates"] == (3 if optimizer else 0)
                    for name, value in mine.items():
                        restored = optimizer or name.startswith("master/")
                        assert torch.equal(value, held[name] if restored else torch.zeros_like(value)), name
                    assert ("exp_avg" in report.ignored) == (not optimizer)
                    assert ("schedule" in report.ignored) == (not schedule)
                    assert "counters" in report.initialised
                    assert engine.steps == 0
