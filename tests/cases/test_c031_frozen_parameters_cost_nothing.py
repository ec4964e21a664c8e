"""With 90 % of the parameters frozen, state is kept for the rest only; frozen ones are still in what is exported."""

import torch
from torch import nn

import trilithon
from against_plain import STAGES
from trilithon.testing import ranks
from trilithon.testing.parity import vector_batches


def mostly_frozen() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(9)]
    model = nn.Sequential(*layers, nn.Linear(16, 16, bias=False))
    for layer in layers:
        layer.requires_grad_(False)
    return model


@ranks(2)
def test_no_state_for_frozen_parameters():
    def loss_of(call, x, target):
        return (call(x) - target).square().mean()

    trainable = 256
    for stage in STAGES:
        for precision in ("fp32", "bf16"):
            model = mostly_frozen()
            start = {name: value.clone() for name, value in model.state_dict().items()}
            settings = {"optimizer": {"kind": "adamw", "lr": 0.1}, "zero": {"stage": stage, "bucket_numel": 1}}
            engine = trilithon.initialize(model, {**settings, "precision": precision})
            for (batch,) in vector_batches(2, 4, out=16):
                x, target = (tensor[engine.rank * 2 : engine.rank * 2 + 2] for tensor in batch)
                engine.backward(loss_of(engine, x, target))
                peak = engine.memory()["gradients"]
                engine.step()
            memory, owned = engine.memory(), trainable // (1 if stage == 0 else 2)
            assert memory["optimizer"] == 2 * 4 * owned, (stage, memory)
            assert memory["master"] == (0 if precision == "fp32" else 4 * owned), (stage, memory)
            assert 0 < peak <= 2 * 4 * trainable, (stage, peak)
            assert all(p.grad is None for p in model.parameters())
            whole = engine.state_dict()
            assert set(whole) == set(start) == {name for name, _ in engine.full_parameters()}
            for name, value in whole.items():
                same = torch.equal(value, start[name].to(value.dtype))
                assert same is (name != "9.weight"), (stage, name)
            engine.close()
