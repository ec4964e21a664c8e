"""Selective recomputation: the bits of none at all, the named results kept and not computed again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from trilithon.checkpointing import Manner, Recompute, chosen_blocks, keep_named, recomputed_as
from trilithon.config import RecomputeConfig
from trilithon.errors import ProtocolError
from trilithon.models import GPT, GPTConfig
from trilithon.testing.live_bytes import LiveBytes

B, T, D, LAYERS = 2, 16, 32, 3
SELECTIVE = RecomputeConfig(policy="selective")


def gpt(dropout: float = 0.0, layers: int = LAYERS) -> GPT:
    torch.manual_seed(1)
    return GPT(GPTConfig(vocab_size=61, context=T, num_layers=layers, width=D, num_heads=2, dropout=dropout))


def tokens() -> Tensor:
    return torch.randint(0, 61, (B, T + 1), generator=torch.Generator().manual_seed(3))


def step(model: GPT) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(7)
    batch = tokens()
    loss = model(batch[:, :-1], batch[:, 1:])
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


class Products(TorchDispatchMode):
    """How many matrix products ran."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_loss_and_gradients_are_the_same_bits(dropout, tier):
    model = gpt(dropout)
    expected_loss, expected = step(model)
    settings = RecomputeConfig(policy="selective", tier=tier, contiguous=tier == "host")
    change = Recompute(model, chosen_blocks(model, settings), settings)
    loss, got = step(model)
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    change.remove()


def test_kept_products_do_not_run_again():
    counts = {}
    for policy in (None, "full", "selective"):
        model = gpt()
        settings = RecomputeConfig(policy=policy or "full")
        if policy:
            Recompute(model, chosen_blocks(model, settings), settings)
        with Products() as products:
            step(model)
        counts[policy] = products.count
    assert counts["full"] > counts[None] == counts["selective"]


def test_what_stays_of_a_block_is_its_input_and_its_products():
    """By slope over blocks: qkv 3, attention 1 and its logsumexp, out 1, up 4, down 1, and the input, of B T D."""
    slopes = {}
    for policy in (None, "full", "selective"):
        found = []
        for layers in (2, 4):
            model, batch = gpt(layers=layers), tokens()
            settings = RecomputeConfig(policy=policy or "full")
            if policy:
                Recompute(model, chosen_blocks(model, settings), settings)
            with LiveBytes() as live:
                loss = model(batch[:, :-1], batch[:, 1:])
                found.append(live.bytes)
            del loss
        slopes[policy] = (found[1] - found[0]) // 2
    unit, heads = B * T * D * 4, 2
    assert slopes["full"] == unit
    assert slopes["selective"] == 11 * unit + B * heads * T * 4
    assert slopes[None] > slopes["selective"]


def test_a_policy_of_torch_is_taken_as_it_is_and_backward_may_run_twice():
    layer = nn.Linear(8, 8, bias=False)
    asked = []

    def policy(context, operator, *args, **kwargs):
        asked.append(operator._schema.name)
        assert isinstance(context.op_output, Tensor) and not context.is_recompute
        return CheckpointPolicy.PREFER_SAVE if operator._schema.name == "aten::mm" else False

    def block(x):
        return torch.tanh(layer(x)).square()

    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    y = recomputed_as(Manner(policy=policy), "block", block, (x,), {})
    for last in (False, True):
        assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=not last)[0], expected)
    assert "aten::mm" in asked and "aten::tanh" in asked


def test_operators_that_only_run_again_do_no_harm_and_kept_ones_are_told():
    """What is gathered for a block in backward differs from forward; a block that changes its products is refused."""
    layer, extra = nn.Linear(8, 8, bias=False), {"ops": 0, "products": 0}

    def block(x):
        for _ in range(extra["ops"]):
            torch.ones(3).mul_(2).cumsum(0)
        for _ in range(extra["products"]):
            x = x @ torch.eye(8)
        return torch.tanh(layer(x)).square()

    x, manner = torch.randn(4, 8, requires_grad=True), Manner(policy=keep_named(["aten::mm"]))
    y = recomputed_as(manner, "block", block, (x,), {})
    extra["ops"] = 3
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(torch.tanh(layer(x)).square().sum(), x)[0])
    y = recomputed_as(manner, "block", block, (x,), {})
    extra["products"] = 1
    with pytest.raises(ProtocolError, match=r"calls aten\.mm\.default more often than in its forward \(1 times\)"):
        y.sum().backward()


def test_a_kept_result_that_was_written_over_is_told():
    layer = nn.Linear(8, 8, bias=False)

    def block(x):
        return torch.tanh(F.linear(x, layer.weight).mul_(2)).square()

    x = torch.randn(4, 8, requires_grad=True)
    y = recomputed_as(Manner(policy=keep_named(["aten::mm"])), "block", block, (x,), {})
    with pytest.raises(ProtocolError, match=r"a result of aten\.mm\.default of shape \(4, 8\) was kept"):
        y.sum().backward()
