"""Which parameters form a unit: kinds never mix, everything is in one unit, and containers own nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trilithon.testing.models import TinyGPT
from trilithon.zero import is_one_unit, one_unit
from trilithon.zero.grouping import FROZEN, Entry, buckets, by_module, common_ancestor


def entries_of(model: nn.Module, dtype_of=lambda name: torch.float32) -> list[Entry]:
    homes: dict[int, list[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for param in module.parameters(recurse=False):
            homes.setdefault(id(param), []).append(module_name)
    return [
        Entry(name, p, 0 if p.requires_grad else FROZEN, dtype_of(name), tuple(homes[id(p)]))
        for name, p in model.named_parameters()
    ]


def plans_of(model: nn.Module, **changes):
    settings = {"bucket_numel": None, "unit_classes": (), "persist_below_numel": 0, "persist_total_numel": None}
    return by_module(model, entries_of(model), **{**settings, **changes})


def test_buckets_close_when_full_and_keep_kinds_apart():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    model[1].requires_grad_(False)
    model[3].double()
    entries = entries_of(model, lambda name: torch.float64 if name == "3.weight" else torch.float32)
    names = [[entry.name for entry in plan.entries] for plan in buckets(entries, 32)]
    assert names == [["0.weight", "2.weight"], ["1.weight"], ["3.weight"], ["4.weight", "5.weight"]]
    assert [len(plan.entries) for plan in buckets(entries_of(model[4]), 1)] == [1]


@pytest.mark.parametrize(
    "changes", [{}, {"bucket_numel": 1}, {"unit_classes": ("Block",)}, {"persist_below_numel": 40}]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_every_parameter_is_in_one_unit_of_one_kind(changes, frozen):
    model = TinyGPT(frozen=frozen, unused=True)
    plans = plans_of(model, **changes)
    names = [entry.name for plan in plans for entry in plan.entries]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for plan in plans:
        assert len({(entry.dtype, entry.trainable) for entry in plan.entries}) == 1
        assert plan.module in dict(model.named_modules())


def test_a_named_class_becomes_a_unit_and_a_tied_weight_belongs_above_both_users():
    plans = {plan.module: [e.name for e in plan.entries] for plan in plans_of(TinyGPT(), unit_classes=("Block",))}
    assert set(plans) == {"", "blocks.0", "blocks.1"}
    assert "tokens.weight" in plans[""] and len(plans["blocks.0"]) == 10


def test_a_marked_module_becomes_a_unit_and_its_likes_do_not():
    model = TinyGPT()
    one_unit(model.blocks[1])
    assert is_one_unit(model.blocks[1]) and not is_one_unit(model.blocks[0])
    assert is_one_unit(model.blocks[1].mlp_norm.weight) and not is_one_unit(model.blocks[0].mlp_norm.weight)
    assert {plan.module for plan in plans_of(model)} == {"", "blocks.1"}
    one_unit(model.blocks[1], marked=False)
    assert {plan.module for plan in plans_of(model)} == {""}


def test_small_parameters_persist_up_to_the_total():
    whole = [plan for plan in plans_of(TinyGPT(), persist_below_numel=100, persist_total_numel=70) if plan.whole]
    assert [entry.name for plan in whole for entry in plan.entries] == [
        "blocks.0.attention_norm.weight",
        "blocks.0.attention_norm.bias",
    ]


def test_containers_without_a_forward_own_nothing():
    model = nn.Module()
    model.rows = nn.ParameterList([nn.Parameter(torch.ones(1000)) for _ in range(3)])
    model.forward = lambda x: x
    assert {plan.module for plan in plans_of(model, bucket_numel=1)} == {""}


def test_common_ancestor():
    assert common_ancestor(["a.b.c", "a.b.d", "a.b"]) == "a.b"
    assert common_ancestor(["a", "b"]) == ""
    assert common_ancestor(["", "a"]) == ""
    assert common_ancestor(["ab", "abc"]) == ""
