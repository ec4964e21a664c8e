"""Blocks of dense models and of models with experts become layers of ours in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trilithon.errors import ConfigError
from trilithon.models import GPT, preset
from trilithon.parallel.moe import ConvertedBlock, FeedForward, convert, layers, load_report

M, INNER, E = 8, 12, 4


def gpt():
    torch.manual_seed(0)
    return GPT(preset("nano", 50, num_layers=4, width=16, num_heads=2, context=16))


def test_a_copy_of_every_block_with_certain_routing_is_the_dense_model():
    """All experts are copies and the weights sum to one, so the converted model computes what the dense one did."""
    model, tokens = gpt(), torch.randint(50, (2, 9))
    before = model(tokens)
    names = convert(model, 4, k=2, every=2, where="*.mlp")
    assert names == ["blocks.1.mlp", "blocks.3.mlp"]
    assert [name for name, _ in layers(model)] == ["blocks.1.mlp.moe", "blocks.3.mlp.moe"]
    assert torch.allclose(model.eval()(tokens), before, atol=1e-5)
    assert all(layer.experts.form is not None for _, layer in layers(model))


def test_blocks_are_found_by_what_they_compute_and_a_pyramid_takes_one_number_each():
    model = gpt()
    assert convert(model, [2, 2, 4, 8], init="independent") == [f"blocks.{i}.mlp" for i in range(4)]
    assert [layer.num_experts for _, layer in layers(model)] == [2, 2, 4, 8]
    model(torch.randint(50, (2, 9)))
    report = load_report(model)
    assert report["balance"] >= 1 - 1e-6 and 0 <= report["drops"] < 1 and report["busiest"] >= 1
    with pytest.raises(ConfigError, match="3 numbers for 4 blocks"):
        convert(gpt(), [2, 2, 4])
    with pytest.raises(ConfigError, match="num_experts is missing"):
        convert(gpt())
    with pytest.raises(ConfigError, match="no block"):
        convert(gpt(), 4, where="*.ffn")


def test_the_balance_loss_joins_backward():
    """The gradient is that of loss + coefficient x balance, times what the loss was multiplied by."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(M, M), FeedForward(M, INNER)).double()
    convert(model, E, balance_coeff=0.3, drop_tokens=False)
    moe = model[1].moe
    x = torch.randn(10, M, dtype=torch.float64)
    y, balance, _ = moe(model[0](x))
    (5.0 * (y.square().sum() + 0.3 * balance)).backward()
    expected = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    moe.loss_factor = 5.0
    (5.0 * model(x).square().sum()).backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(param.grad, grad, rtol=0, atol=1e-13)
    model.eval()
    assert torch.equal(model(x), y) or torch.allclose(model(x), y, rtol=0, atol=1e-14)


class Router(nn.Module):
    def __init__(self, normalise):
        super().__init__()
        self.top_k, self.norm_topk_prob = 2, normalise
        self.weight = nn.Parameter(torch.randn(E, M))

    def forward(self, x):
        probs = F.linear(x, self.weight).softmax(-1)
        values, indices = probs.topk(self.top_k)
        return values / values.sum(-1, keepdim=True) if self.norm_topk_prob else values, indices


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * INNER, M) / 3)
        self.down_proj = nn.Parameter(torch.randn(E, M, INNER) / 3)
        self.act_fn = nn.SiLU()

    def one(self, x, e):
        gate, up = F.linear(x, self.gate_up_proj[e]).chunk(2, -1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[e])


class Listed(nn.ModuleList):
    def __init__(self):
        super().__init__(nn.Module() for _ in range(E))
        for expert in self:
            expert.w1, expert.w3 = nn.Linear(M, INNER, bias=False), nn.Linear(M, INNER, bias=False)
            expert.w2, expert.act_fn = nn.Linear(INNER, M, bias=False), nn.SiLU()

    def one(self, x, e):
        return self[e].w2(self[e].act_fn(self[e].w1(x)) * self[e].w3(x))


class Sparse(nn.Module):
    """A block in the shape of Mixtral's or Qwen's, computed token by token."""

    def __init__(self, experts, normalise, shared=False, sigmoid=False):
        super().__init__()
        self.gate, self.experts, self.sigmoid = Router(normalise), experts, sigmoid
        if shared:
            self.shared_expert = FeedForward(M, INNER, activation="silu", gated=True, bias=False)
            self.shared_expert_gate = nn.Linear(M, 1, bias=False)

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, M)
        weights, indices = self.gate(x)
        if self.sigmoid:
            weights = weights.sigmoid()
        rows = [
            sum(weights[s, j] * self.experts.one(x[s], int(indices[s, j])) for j in range(2)) for s in range(len(x))
        ]
        y = torch.stack(rows)
        if hasattr(self, "shared_expert"):
            y = y + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y.view(hidden_states.shape)


@pytest.mark.parametrize("experts", [Fused, Listed])
@pytest.mark.parametrize(("normalise", "shared"), [(True, False), (False, False), (True, True)])
def test_a_block_with_experts_keeps_its_weights_and_outputs(experts, normalise, shared):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(M, M), Sparse(experts(), normalise, shared))
    x = torch.randn(3, 5, M)
    before = model(x)
    count = sum(param.numel() for param in model.parameters())
    assert convert(model) == ["1"]
    assert isinstance(model[1], ConvertedBlock)
    assert torch.allclose(model(x), before, rtol=1e-4, atol=1e-5)
    assert sum(param.numel() for param in model.parameters()) == count
    model(x).square().sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_a_router_of_another_kind_is_refused_by_name():
    model = nn.Sequential(nn.Linear(M, M), Sparse(Fused(), True, sigmoid=True))
    with pytest.raises(ConfigError, match=r"block '1' \(Sparse\) routes in a way of its own"):
        convert(model)
    assert isinstance(model[1], Sparse)


def test_a_block_with_dropout_runs_one_expert_at_a_time():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(M, INNER), nn.GELU(), nn.Dropout(0.5), nn.Linear(INNER, M))
    model = nn.Sequential(nn.Linear(M, M), block)
    x = torch.randn(4, M)
    before = model.eval()(x)
    convert(model, E, k=2, where="1", init="copy")
    assert model[1].moe.experts.form is None
    assert torch.allclose(model(x), before, atol=1e-6)
    assert not torch.equal(model.train()(x), model(x))
