"""Parameter groups: by name, live, without frozen parameters, and refused when they name what the model lacks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trilithon.config.optimizer import AdamW
from trilithon.errors import ConfigError
from trilithon.optim.groups import groups_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_torch_optimizer_keeps_its_groups_and_they_stay_live() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(
        [{"params": [model.embed.weight], "lr": 0.5}, {"params": model.norm.parameters(), "weight_decay": 0.0}], lr=0.1
    )
    groups = groups_of(model, optimizer)
    assert [group["params"] for group in groups] == [["embed.weight"], ["norm.weight", "norm.bias"]]
    assert [group["lr"] for group in groups] == [0.5, 0.1]
    optimizer.param_groups[0]["lr"] = 0.25
    groups[1]["lr"] = 0.75
    assert groups[0]["lr"] == 0.25 and optimizer.param_groups[1]["lr"] == 0.75
    assert optimizer.param_groups[0]["params"] == [model.embed.weight]  # the user's own list is untouched


def test_a_configured_optimizer_takes_all_trainable_parameters_once() -> None:
    model = Tied()
    model.norm.bias.requires_grad_(False)
    (group,) = groups_of(model, AdamW(lr=0.3, weight_decay=0.1))
    assert group["params"] == ["embed.weight", "norm.weight"]
    assert (group["lr"], group["weight_decay"], group["betas"], "kind" in group) == (0.3, 0.1, (0.9, 0.999), False)
    assert set(group) == {"params", "lr", "betas", "eps", "weight_decay", "bias_correction"}
    assert len(group) == 6


def test_a_configured_optimizer_takes_groups_with_settings_of_their_own() -> None:
    model = Tied()
    groups = groups_of(
        model,
        AdamW(lr=0.3, weight_decay=0.1),
        [{"params": model.norm.parameters(), "weight_decay": 0.0}, {"params": model.embed.weight, "lr": 0.0}],
    )
    assert [group["params"] for group in groups] == [["norm.weight", "norm.bias"], ["embed.weight"]]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.3, 0.0), (0.0, 0.1)]
    (only,) = groups_of(model, AdamW(), model.norm.parameters())
    assert only["params"] == ["norm.weight", "norm.bias"]


def test_a_class_or_function_makes_the_optimizer_over_trainable_parameters() -> None:
    model = Tied()
    model.norm.bias.requires_grad_(False)
    (group,) = groups_of(model, lambda params: torch.optim.SGD(params, lr=0.2))
    assert isinstance(group.optimizer, torch.optim.SGD)
    assert group["params"] == ["embed.weight", "norm.weight"] and group["lr"] == 0.2
    split = groups_of(model, torch.optim.Adam, [{"params": [model.norm.weight], "lr": 0.7}])
    assert [(g["params"], g["lr"]) for g in split] == [(["norm.weight"], 0.7)]


def test_frozen_parameters_are_left_out_of_a_torch_optimizers_groups() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.embed.weight.requires_grad_(False)
    assert groups_of(model, optimizer)[0]["params"] == ["norm.weight", "norm.bias"]


def test_settings_can_be_added_and_removed_but_params_are_fixed() -> None:
    (group,) = groups_of(Tied(), AdamW())
    group["initial_lr"] = 1.0
    del group["initial_lr"]
    assert "initial_lr" not in group
    assert repr(group).startswith("Group(3 parameters, {'lr': ")
    with pytest.raises(TypeError, match="fixed"):
        group["params"] = []


def test_what_does_not_fit_is_refused() -> None:
    model = Tied()
    with pytest.raises(ConfigError, match=r"Tensor 0 of parameter group 0 \(shape \(2, 2\)\) is not a parameter"):
        groups_of(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"'embed.weight' is in groups 0 and 1"):
        groups_of(model, AdamW(), [{"params": [model.embed.weight]}, {"params": [model.head.weight]}])
    with pytest.raises(ConfigError, match="leave `parameters` out"):
        groups_of(model, torch.optim.SGD(model.parameters(), lr=0.1), model.parameters())
    with pytest.raises(ConfigError, match="returned a int"):
        groups_of(model, lambda params: 3)  # type: ignore[arg-type, return-value]
