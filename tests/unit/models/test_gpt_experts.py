"""A GPT with experts: which layers have them, how many parameters and how much arithmetic that makes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trilithon.errors import ConfigError
from trilithon.models import GPT, preset
from trilithon.parallel.moe import layers, load_report

SDPA = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def shape(**changes):
    return preset("nano", 31, **{"width": 16, "num_layers": 4, "num_heads": 2, "context": 12, **changes})


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_every_other_layer_has_experts_and_parameters_are_counted(activation):
    config = shape(experts=4, top_k=2, activation=activation)
    model = GPT(config)
    assert [name for name, _ in layers(model)] == ["blocks.1.mlp.moe", "blocks.3.mlp.moe"]
    assert config.num_parameters() == sum(param.numel() for param in model.parameters())
    dense = shape(activation=activation)
    assert dense.num_parameters() == sum(param.numel() for param in GPT(dense).parameters())
    down = model.blocks[3].mlp.moe.experts.get_parameter("down.weight")
    assert down.shape[0] == 4 and down.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.1)


def test_arithmetic_per_token_is_that_of_the_experts_it_goes_to():
    """Without anything dropped. A multiply-add counts two; torch does not count the attention of this CPU."""
    config = shape(experts=4, top_k=2, capacity_factor=None, expert_every=1)
    model, tokens = GPT(config), torch.randint(31, (2, 12))
    with FlopCounterMode(display=False) as counted:
        model(tokens)
    assert counted.get_total_flops() - counted.flop_counts["Global"].get(SDPA, 0) == 24 * 2 * config.matrix_parameters()


def test_it_trains_and_reports_its_load():
    torch.manual_seed(0)
    model, tokens = GPT(shape(experts=4, capacity_factor=1.0)), torch.randint(31, (4, 13))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(param.grad is not None for param in model.parameters())
    assert load_report(model)["balance"] == pytest.approx(1, abs=0.2)
    whole = model.eval()(tokens[:, :-1])
    assert torch.allclose(whole[:1], model(tokens[:1, :-1]), atol=1e-5)  # evaluation drops nothing


def test_numbers_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match="top_k=3"):
        shape(experts=2, top_k=3)
    with pytest.raises(ConfigError, match="experts=4 do not split over ep_size=3"):
        shape(experts=4, ep_size=3)
