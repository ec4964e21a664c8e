"""From the second backward of a window on, autograd adds to the engine's sums by itself."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trilithon
from trilithon.errors import ProtocolError


class Twice(nn.Module):
    """One weight used twice, one now and then, one in a recomputed part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.rare, self.again = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.rows = nn.Embedding(6, 4, sparse=True)

    def forward(self, x, rare):
        y = self.shared(self.shared(x)) + self.rows(torch.tensor([1, 3]))
        y = self.rare(y) if rare else y
        return checkpoint(self.again, y, use_reentrant=True).square().mean()


def settings(stage, **more):
    return {"zero": {"stage": stage}, "optimizer": {"kind": "sgd", "lr": 0.1}, "batch": {"accumulation": 4}, **more}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("no_sync", [False, True])
def test_sums_are_those_of_plain_autograd_to_the_bit(stage, no_sync):
    inputs = [(torch.randn(2, 4, generator=torch.Generator().manual_seed(i)), i == 2) for i in range(4)]
    plain = Twice()
    for x, rare in inputs:
        (plain(x, rare) / 4).backward()
    with trilithon.initialize(Twice(), settings(stage)) as engine:
        for place, (x, rare) in enumerate(inputs):
            if no_sync and place < 3:
                with engine.no_sync():
                    engine.backward(engine(x, rare))
            else:
                engine.backward(engine(x, rare))
        found = dict(engine.view("grad"))
        for name, param in plain.named_parameters():
            expected = param.grad.to_dense() if param.grad.is_sparse else param.grad
            assert torch.equal(found[name], expected), name


def test_autograd_adds_in_place_and_makes_no_call_for_it():
    """The gradient that a hook on the parameter sees is the sum so far, where the engine keeps it."""
    model = nn.Linear(3, 1, bias=False)
    seen = []
    model.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    with trilithon.initialize(model, settings(1)) as engine:
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 3)).sum())
    assert [float(grad[0, 0]) for grad in seen] == [0.5, 1.0, 1.5, 2.0]


def test_a_backward_that_fails_leaves_no_sum_in_param_grad():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("no gradient")

    model = nn.Linear(3, 1)
    with trilithon.initialize(model, settings(1)) as engine:
        engine.backward(engine(torch.ones(2, 3)).sum())
        with pytest.raises(ArithmeticError):
            engine.backward(Fails.apply(engine(torch.ones(2, 3))).sum())
        assert model.weight.grad is None and model.bias.grad is None


def test_the_backward_of_another_engine_adds_nothing():
    """Its loss runs through this model, in the middle of a window."""
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)
    with trilithon.initialize(first, settings(1)) as one, trilithon.initialize(second, settings(1)) as other:
        x = torch.ones(2, 3)
        one.backward(one(x).sum())
        one.backward(one(x).sum())
        before = dict(one.view("grad"))["weight"]
        other.backward(other(one(x)).sum())
        assert torch.equal(dict(one.view("grad"))["weight"], before)
        one.backward(one(x).sum())
        with pytest.raises(ProtocolError, match="held by an engine"):
            first.weight.grad.norm()
