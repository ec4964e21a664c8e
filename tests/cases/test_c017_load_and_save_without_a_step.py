"""Save, load, save with no step between, in every order and at every stage: the checkpoints hold the same."""

import torch

import trilithon
from saved_runs import OddNet, batches, settings, train
from trilithon.checkpoint import open_checkpoint
from trilithon.testing import ranks


def tensors(folder):
    with open_checkpoint(folder) as reader:
        return {(e.part, e.name): reader.read(e.part, e.name) for e in reader.entries()}, reader.extra["counters"]


def same(one, other):
    (left, left_counters), (right, right_counters) = tensors(one), tensors(other)
    return (
        left_counters == right_counters
        and left.keys() == right.keys()
        and all(torch.equal(left[key], right[key]) for key in left)
    )


@ranks(1, 2)
def test_every_order_works_and_the_content_stays(tmp_path):
    for stage in (0, 1, 2, 3):
        here = tmp_path / str(stage)
        with trilithon.initialize(OddNet(), settings(stage, "bf16")) as engine:
            train(engine, batches(1))
            engine.save(here / "first")
        for order in ("save load", "load save", "load load save", "save save"):
            with trilithon.initialize(OddNet(seed=3), settings(stage, "bf16")) as engine:
                made = []
                for number, call in enumerate(order.split()):
                    if call == "load":
                        engine.load(made[-1] if made else here / "first")
                    else:
                        made.append(here / f"{order} {number}")
                        engine.save(made[-1])
                if order.startswith("load"):
                    assert same(here / "first", made[-1]), (stage, order)
                assert same(made[0], made[-1]), (stage, order)
