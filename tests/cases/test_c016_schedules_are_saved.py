"""A scheduler that the engine was given goes on where it was; of one that it was not given, the save says so."""

import torch

import trilithon
from saved_runs import OddNet, batches, train
from trilithon.testing import ranks


def build(given, seed):
    model = OddNet(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 6, 7], gamma=0.5)
    return trilithon.initialize(model, {}, optimizer, schedule if given else None), schedule


@ranks(2)
def test_a_torch_scheduler_given_to_the_engine(tmp_path):
    engine, _ = build(True, 0)
    with engine:
        train(engine, batches(5))
        engine.save(tmp_path)
        assert engine.last_save.notes == ()
        rates = []
        for batch in batches(3):
            rates.append(engine.lr)
            train(engine, [batch])
    engine, schedule = build(True, 5)
    with engine:
        engine.load(tmp_path)
        assert schedule.last_epoch == 5
        for batch, rate in zip(batches(3), rates, strict=True):
            assert engine.lr == rate
            train(engine, [batch])


@ranks(2)
def test_a_scheduler_that_the_user_keeps(tmp_path):
    engine, schedule = build(False, 0)
    with engine:
        for batch in batches(5):
            train(engine, [batch])
            schedule.step()
        engine.save(tmp_path / "without")
        assert "was given no learning-rate schedule" in engine.last_save.notes[0]
        engine.stateful["schedule"] = schedule
        engine.save(tmp_path / "with")
        rate = engine.lr
    engine, schedule = build(False, 5)
    with engine:
        engine.stateful["schedule"] = schedule
        engine.load(tmp_path / "with")
        assert schedule.last_epoch == 5
        assert engine.lr == rate == [0.05]
