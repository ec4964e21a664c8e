"""What goes wrong on a mesh is agreed on and named: overflow, drifting replicas, meshes and models that do not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mesh_runs import make
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from trilithon.engine.build import initialize
from trilithon.errors import ConfigError, ProtocolError
from trilithon.models import GPT, GPTConfig
from trilithon.testing import ranks

TOKENS = torch.arange(8)[None] % 61


def config(mesh: dict[str, int], **more: Any) -> dict[str, Any]:
    return {"mesh": mesh, "optimizer": {"kind": "sgd", "lr": 0.1}, **more}


@ranks(2, 4)
def test_an_overflow_in_one_slice_on_one_rank_skips_the_step_everywhere(world_size):
    mesh = {"tensor": 2} if world_size == 2 else {"data": 2, "tensor": 2}
    scale = {"kind": "fp16", "loss_scale": 0.0}
    with initialize(make("gpt"), config(mesh, precision=scale, batch={"micro_size": 1})) as engine:
        before = engine.state_dict()
        if engine.rank == 1:
            weight = engine.module.blocks[0].mlp.up.weight
            weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
        engine.train_step([(TOKENS, TOKENS)])
        assert (engine.steps, engine.skipped_steps) == (0, 1) and engine.non_finite > 0
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


class HeadNorms(nn.Module):
    """Attention without tokens to mix, but with a norm on single heads, which sees the heads that are here."""

    def __init__(self):
        super().__init__()
        self.up, self.q_scale, self.down = nn.Linear(8, 16), nn.RMSNorm(4), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.q_scale(self.up(x).unflatten(-1, (-1, 4))).flatten(-2)).square().mean()


@ranks(2)
@pytest.mark.parametrize("declared", [False, True])
def test_replicas_that_drift_apart_are_named_unless_the_plan_says_how_they_are_used(world_size, declared):
    plan = {"up": "column", "down": "row", **({"q_scale": "summed"} if declared else {})}
    x = torch.linspace(-1, 1, 16).view(2, 8)
    with initialize(HeadNorms(), config({"tensor": 2}, tensor={"plan": plan}, batch={"micro_size": 2})) as engine:
        engine.train_step([(x,)])
        if not declared:
            with pytest.raises(ProtocolError, match=r"after 1 steps \['q_scale.weight'\] differ.*\"summed\""):
                engine.train_step([(x,)])
            return
        engine.train_step([(x,)])
        gradient = dict(engine.full_parameters())["q_scale.weight"]
    alone = HeadNorms()
    alone.load_state_dict({name: param.detach() for name, param in engine.module.named_parameters()})
    torch.testing.assert_close(gradient, alone.q_scale.weight.detach())


@ranks(2)
def test_a_mesh_of_the_callers_own_is_taken(world_size):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    with initialize(make("gpt"), {"optimizer": "sgd"}, mesh=mesh) as engine:
        assert dict(zip(engine.mesh.axes.names, engine.mesh.axes.sizes))["tensor"] == 2
        assert engine.mesh.part("tensor") == (engine.rank, 2) and engine.mesh.data_size == 1
        assert "blocks.0.mlp.up.weight" in engine.slices
    with pytest.raises(ConfigError, match="keep one of the two"):
        initialize(make("gpt"), config({"sequence": 2}), mesh=mesh)


def refusal(model: nn.Module, mesh: dict[str, int], **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        initialize(model, config(mesh, **more))
    return str(caught.value)


@ranks(2)
def test_what_does_not_fit_the_mesh_is_refused_with_a_way_out(world_size):
    three = GPTConfig(vocab_size=61, context=8, num_layers=1, width=12, num_heads=3)
    assert "num_heads=3 does not split over 2 tensor ranks" in refusal(GPT(three), {"tensor": 2})
    assert "no CutTokens and no HeadExchange and no TokenLoss" in refusal(HeadNorms(), {"sequence": 2})
    assert "Use zero.stage 0, 1 or 2 inside" in refusal(make("gpt"), {"pipe": 2}, zero={"stage": 3})
    assert "mesh.tensor=3 does not divide 2 ranks" in refusal(make("gpt"), {"tensor": 3})
    plan = {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}
    wrong = {"plan": plan, "cut_norms": True}
    assert 'cut as "vocabulary"' in refusal(make("gpt"), {"tensor": 2}, tensor=wrong)
    bare = nn.ModuleDict({"a": nn.Linear(4, 4)})
    assert "no layer of ModuleDict was recognised" in refusal(bare, {"tensor": 2})
    tiled = {"stage": 3, "tile_above_numel": 100}
    assert "cuts linear layers into tiles" in refusal(make("gpt"), {"tensor": 2}, zero=tiled)
    model = GPT(three)
    with initialize(model, config({"sequence": 2})) as engine:
        with pytest.raises(ConfigError, match="3 attention heads on this rank do not split over 2 sequence ranks"):
            engine(TOKENS, TOKENS)
        with pytest.raises(ConfigError, match=r"7 tokens do not split over 2 ranks\. Pad or cut to 6 or 8"):
            engine(TOKENS[:, :7], TOKENS[:, :7])


@ranks(2)
def test_an_optimizer_that_needs_whole_matrices_is_refused(world_size):
    class Centred(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad -= param.grad.mean()
            return super().step(closure)

    model = make("gpt")
    with pytest.raises(ConfigError, match=r"mesh.tensor=1"):
        initialize(model, {"mesh": {"tensor": 2}}, optimizer=Centred(model.parameters(), lr=0.1))
    assert model.blocks[0].mlp.up.weight.shape == (128, 32)  # an ordinary model again


@ranks(2)
def test_weights_of_losses_count_samples_and_not_ranks(world_size):
    """Two micro-batches with 1 and 3 samples: the gradient is that of their mean, however many ranks share them."""
    x = torch.linspace(-1, 1, 32).view(4, 8)
    plan = {"up": "column", "down": "row", "q_scale": "summed"}
    norms = []
    for mesh, tensor in (({"tensor": 2}, {"plan": plan}), ({}, {})):
        model = HeadNorms()
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
        sizes = {"micro_size": 1, "accumulation": 2}
        with initialize(model, config(mesh, **({"tensor": tensor} if tensor else {}), batch=sizes)) as engine:
            for part in (x[:1], x[1:]):
                engine.backward(engine(part) * len(part), weight=len(part))
            engine.step()
            norms.append((engine.grad_norm, engine.loss))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@ranks(2)
@pytest.mark.parametrize("axis", ["tensor", "sequence"])
def test_rules_that_exchange_gradients_themselves_are_refused(world_size, axis):
    with pytest.raises(ConfigError, match=rf"optimizer onebit_adam exchanges gradients.*mesh\.{axis}=2"):
        initialize(make("gpt"), {"mesh": {axis: 2}, "optimizer": {"kind": "onebit_adam", "lr": 0.1}})


@ranks(2)
def test_state_on_the_host_trains_alike_under_tensor_slices(world_size):
    found = []
    for state in ("device", "host"):
        settings = config({"tensor": 2}, zero={"stage": 1}, offload={"state": state, "sub_group_numel": 500})
        settings["optimizer"] = {"kind": "adamw", "lr": 1e-3}
        with initialize(make("gpt"), settings) as engine:
            losses = [engine.train_step([(TOKENS, TOKENS)]) for _ in range(3)]
            found.append((losses, dict(engine.full_parameters())))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
