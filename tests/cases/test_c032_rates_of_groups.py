"""Three groups with the rates 0.1, 0.01 and 0, one step of SGD: each parameter moves by its own rate."""

import torch
from torch import nn

import trilithon
from against_plain import STAGES
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import rank_part, vector_batches

RATES = {"layers.0": 0.1, "layers.1": 0.01, "last": 0.0}


def groups(model: nn.Module) -> list[dict]:
    return [{"params": list(model.get_submodule(name).parameters()), "lr": lr} for name, lr in RATES.items()]


@ranks(2)
def test_each_group_has_its_rate():
    (batch,) = vector_batches(1, 4)[0]
    plain = MLP()
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    update = torch.optim.SGD(groups(plain), lr=1.0)
    plain(*batch).backward()
    update.step()
    expected = dict(plain.named_parameters())
    for stage in STAGES:
        for how in ("own optimizer", "configured"):
            model = MLP()
            settings = {"zero": {"stage": stage, "bucket_numel": 100}}
            if how == "own optimizer":
                engine = trilithon.initialize(model, settings, torch.optim.SGD(groups(model), lr=1.0))
            else:
                settings["optimizer"] = {"kind": "sgd", "lr": 1.0}
                engine = trilithon.initialize(model, settings, parameters=groups(model))
            assert engine.lr == [0.1, 0.01, 0.0]
            engine.backward(engine(*rank_part(batch, engine.rank, 2)))
            assert engine.step()
            for name, got in engine.full_parameters():
                torch.testing.assert_close(got, expected[name].detach(), rtol=1e-6, atol=1e-7, msg=f"{stage} {name}")
                assert torch.equal(got, start[name]) is name.startswith("last"), (stage, name)
            engine.close()
