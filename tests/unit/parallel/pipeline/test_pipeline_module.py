"""Models as lists of layers: what is built, what is kept, what it is called, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trilithon
from trilithon import LayerSpec, PipelineModule, TiedLayerSpec
from trilithon.errors import ConfigError, ProtocolError
from trilithon.models import GPT, GPTConfig
from trilithon.parallel.pipeline import Elsewhere, layer_seconds
from trilithon.parallel.pipeline.layers import drop_layers, layers_of, shared_parameters
from trilithon.parallel.pipeline.plan import plan_stages
from trilithon.parallel.pipeline.seeds import layer_seed
from trilithon.parallel.pipeline.weights import WeightGradients, split_linears

MSE = nn.functional.mse_loss


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=16, width=8, num_layers=4, num_heads=2, context=8, tie_embeddings=True))


def test_a_whole_list_is_an_ordinary_model_with_the_names_of_a_sequence():
    model = PipelineModule([LayerSpec(nn.Linear, 3, 4), torch.relu, nn.Linear(4, 2)], loss_fn=MSE)
    assert list(dict(model.named_parameters())) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    x = torch.randn(5, 3)
    plain = nn.Sequential(model.get_submodule("0"), nn.ReLU(), model.get_submodule("2"))
    assert torch.equal(model(x), plain(x))
    with trilithon.initialize(model, {"optimizer": "sgd", "batch": {"micro_size": 5}}) as engine:
        loss = engine(x).square().mean()
        engine.backward(loss)
        assert engine.step() and engine.train_step([(x, torch.zeros(5, 2))]) > 0


def test_initial_values_follow_from_one_draw_and_the_place():
    def weights(*counts: int) -> list[torch.Tensor]:
        torch.manual_seed(3)
        return list(PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in counts]).parameters())

    few, many = weights(1, 2), weights(1, 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(few, many)) and not torch.equal(many[0], many[2])
    seeds = []
    PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, seed_layers=True, seed_fn=seeds.append, base_seed=7)
    assert seeds == [7, 8]
    assert len({layer_seed(1, micro, layer) for micro in range(20) for layer in range(20)}) == 400


def test_layers_with_one_key_are_one_module():
    layers = [
        TiedLayerSpec("e", nn.Embedding, 5, 3),
        nn.ReLU(),
        TiedLayerSpec("e", nn.Embedding, 5, 3, forward_fn=head),
    ]
    model = PipelineModule(layers)
    assert [name for name, _ in model.named_parameters()] == ["0.weight"]
    assert model(torch.tensor([1, 2])).shape == (2, 5)
    assert model.shared() == {"0": (0, 2)}
    twice = nn.Linear(3, 3)
    assert PipelineModule([twice, nn.Tanh(), twice]).shared() == {"0": (0, 2)}


def head(embedding, x):
    return x @ embedding.weight.T


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_of_a_gpt_has_its_blocks_and_the_names_of_the_whole(stage):
    model, whole = small_gpt(), dict(small_gpt().named_parameters())
    layers = layers_of(model)
    plan = plan_stages(layers, "uniform", 3, stage, 1, shared_parameters(model, layers))
    assert plan.bounds == (0, 2, 4, 6) and plan.shared == {"embedding.weight": (0, 2)} and plan.ties == [(0, 2)]
    drop_layers(model, layers, plan.kept)
    here = dict(model.named_parameters())
    blocks = {0: {"0"}, 1: {"1", "2"}, 2: {"3"}}[stage]
    assert {name.split(".")[1] for name in here if name.startswith("blocks")} == blocks
    assert ("embedding.weight" in here) == (stage != 1) and ("norm.weight" in here) == (stage == 2)
    assert list(here) == [name for name in whole if name in here]  # in the same order
    assert all(torch.equal(value, whole[name]) for name, value in here.items())
    assert plan.stages_of("embedding.weight") == (0, 2) and plan.stages_of("norm.weight") == (stage,)
    if stage == 2:
        assert model.head.weight is here["embedding.weight"]
    gone = next(module for module in model.modules() if isinstance(module, Elsewhere))
    with pytest.raises(ProtocolError, match="on another stage"):
        gone(torch.zeros(1))
    assert "stage  chunk" in plan.table(layers)


def test_a_sequence_is_taken_as_it_is():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    layers = layers_of(model)
    assert [layer.kind for layer in layers] == ["Linear", "ReLU", "Linear"]
    drop_layers(model, layers, [2])
    assert list(dict(model.named_parameters())) == ["2.weight", "2.bias"]
    assert layers[2].run(torch.zeros(1, 3)).shape == (1, 2)


def test_time_is_measured_layer_by_layer():
    model = PipelineModule([nn.Linear(64, 512), nn.Identity(), nn.Linear(512, 512), torch.relu], loss_fn=MSE)
    seconds = layer_seconds(model, torch.randn(64, 64), repeats=3)
    assert len(seconds) == 4 and all(one > 0 for one in seconds) and seconds[2] > seconds[1]
    assert all(param.grad is None for param in model.parameters())


def test_split_backward_makes_the_same_gradients_in_two_parts():
    def gradients(*, apart: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6), nn.Linear(6, 3, bias=False))
        undo = split_linears(model)
        x, later = torch.randn(2, 5, 4, requires_grad=True), WeightGradients()
        loss = model(x).square().sum()
        if apart:
            with later.collected():
                loss.backward()
            assert model[0].weight.grad is None and model[1].weight.grad is not None
            later.compute()
        else:
            loss.backward()
        undo()
        assert "forward" not in vars(model[0])
        return [x.grad, *(param.grad for param in model.parameters())]

    torch.manual_seed(0)
    for split, whole in zip(gradients(apart=True), gradients(apart=False), strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-6)


class NoWeight(nn.Module):
    pass


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: LayerSpec(torch.relu), "takes a class of torch.nn.Module"),
        (lambda: PipelineModule([]), "empty list"),
        (lambda: PipelineModule([3]), "layer 0 is a int"),
        (lambda: PipelineModule([TiedLayerSpec("a", NoWeight)]), "has no parameter 'weight'"),
        (
            lambda: PipelineModule([TiedLayerSpec("a", nn.Linear, 2, 2), TiedLayerSpec("a", nn.Embedding, 2, 2)]),
            "layers 0 and 1 have the key 'a' and different classes",
        ),
        (lambda: PipelineModule([nn.ReLU()], num_stages=2), "num_stages=2 does not divide 1 ranks"),
        (lambda: PipelineModule([nn.ReLU()], num_stages=0), "at least one stage"),
        (lambda: PipelineModule([nn.ReLU()]).cut(2, 0), "1 layers do not make 2 stages"),
        (lambda: PipelineModule([nn.ReLU()] * 3, partition_method=[1.0]).cut(2, 0), "has 1 weights, and there are 3"),
        (lambda: layers_of(nn.Bilinear(2, 2, 2)), "does not say how it is a list of layers"),
        (lambda: shared_parameters(*with_a_stray()), r"\['stray'\] belong to no layer"),
    ],
)
def test_what_is_no_list_of_layers_is_refused(call, text):
    with pytest.raises(ConfigError, match=text):
        call()


def with_a_stray():
    model = small_gpt()
    model.register_parameter("stray", nn.Parameter(torch.zeros(1)))
    return model, layers_of(model)


def test_a_loss_that_is_none_is_named():
    with pytest.raises(ProtocolError, match="got a int"):
        PipelineModule([nn.ReLU()], loss_fn=lambda output, labels: 3).pipeline_loss(None, None)
