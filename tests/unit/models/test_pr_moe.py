"""The models of DeepSpeed-MoE have the sizes that the paper prints, and are what is counted."""

import pytest
import torch

from trilithon.errors import ConfigError
from trilithon.models.pr_moe import MODELS, PrMoE, PrMoEConfig
from trilithon.parallel.moe import layers

PAPER = {  # billions, with the digits printed
    "1.3B": "1.3", "6.7B": "6.7", "350M+MoE-128": "13", "1.3B+MoE-128": "52", "350M+PR-MoE-32/64": "4",
    "1.3B+PR-MoE-64/128": "31", "350M+PR-MoE+MoS": "3.5", "1.3B+PR-MoE+MoS": "27",
}  # fmt: skip
EXACT = {"2.4B+MoE-128": 107.7, "8B+MoE-128": 349.0, "24B+MoE-128": 1046.9, "47B+MoE-128": 2024.0}


@pytest.mark.parametrize("name", PAPER)
def test_sizes_round_to_the_digits_of_the_paper(name):
    digits = len(PAPER[name].partition(".")[2])
    assert f"{MODELS[name].num_parameters() / 1e9:.{digits}f}" == PAPER[name]


@pytest.mark.parametrize("name", EXACT)
def test_sizes_printed_with_more_digits_agree_within_one_percent(name):
    assert MODELS[name].num_parameters() / 1e9 == pytest.approx(EXACT[name], rel=0.01)


@pytest.mark.parametrize("name", ["350M", "350M+PR-MoE-32/64", "350M+MoE-128"])
def test_a_model_has_the_parameters_that_are_counted(name):
    with torch.device("meta"):
        model = PrMoE(PrMoEConfig.named(name))
    assert sum(param.numel() for param in model.parameters()) == MODELS[name].num_parameters()


@pytest.mark.parametrize("residual", [False, True])
def test_a_small_one_trains_and_is_what_is_counted(residual):
    config = PrMoEConfig(
        num_layers=4, width=16, num_heads=2, experts=(2, 4), residual=residual, vocab_size=31, context=8
    )
    torch.manual_seed(0)
    model, tokens = PrMoE(config), torch.randint(31, (2, 9))
    assert sum(param.numel() for param in model.parameters()) == config.num_parameters()
    assert [(name, layer.num_experts) for name, layer in layers(model)] == [
        ("blocks.1.mlp.moe", 2),
        ("blocks.3.mlp.moe", 4),
    ]
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert loss.item() == pytest.approx(3.43, abs=0.2)  # log 31
    assert all(param.grad is not None for param in model.parameters())


def test_a_student_is_the_same_family_with_fewer_layers():
    assert MODELS["350M+PR-MoE-32/64"].student(21) == MODELS["350M+PR-MoE+MoS"]
    assert MODELS["1.3B+PR-MoE-64/128"].student(21) == MODELS["1.3B+PR-MoE+MoS"]
    with pytest.raises(ConfigError, match="between 2 and that"):
        MODELS["350M"].student(24)
    with pytest.raises(ConfigError, match="names 3 numbers"):
        PrMoE(PrMoEConfig(num_layers=4, width=16, num_heads=2, experts=(2, 2, 2)))
    with pytest.raises(ConfigError, match="does not exist"):
        PrMoEConfig.named("350B")
