"""Somebody else's optimizer over our masters: live groups, whole parameters, replaced tensors, state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trilithon.contracts import ReduceOp, Shard, Slice
from trilithon.errors import CheckpointError
from trilithon.optim.build import make_update
from trilithon.optim.foreign import Foreign
from trilithon.optim.groups import groups_of


def alone(local: Tensor, op: ReduceOp) -> Tensor:
    return local


def whole_slice(model: nn.Module) -> Slice:
    """Every parameter of the model, one after another."""
    shards, place = [], 0
    for name, p in model.named_parameters():
        shards.append(Shard(name, 0, p.numel(), place, p.shape))
        place += p.numel()
    master = torch.cat([p.detach().flatten() for p in model.parameters()])
    return Slice("unit", 0, master, torch.zeros(place), torch.empty(place, dtype=torch.bfloat16), shards)


def set_gradients(model: nn.Module, slice_: Slice) -> None:
    slice_.grad = torch.randn(slice_.master.numel())
    for (_, p), shard in zip(model.named_parameters(), slice_.shards):
        p.grad = slice_.grad[shard.offset : shard.offset + shard.numel].view_as(p).clone()


@pytest.mark.parametrize("cls", [torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta])
def test_twenty_steps_equal_the_optimizer_without_us(cls: Any) -> None:
    reference, model = nn.Linear(8, 8), nn.Linear(8, 8)
    model.load_state_dict(reference.state_dict())
    theirs, mine = cls(reference.parameters(), lr=0.01), cls(model.parameters(), lr=0.01)
    update = make_update(mine, groups_of(model, mine), ["weight", "bias"])
    slice_ = whole_slice(model)
    for step in range(20):
        set_gradients(reference, slice_)
        theirs.step()
        update.apply(step + 1, [slice_], 1.0, lambda _: None, alone)
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    torch.testing.assert_close(slice_.master, expected, rtol=0, atol=20 * 8 * 2.0**-24)


def test_a_scheduler_on_the_users_optimizer_keeps_its_effect() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.01)
    groups = groups_of(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.0)  # rate 0 after one step
    update, slice_ = make_update(optimizer, groups, ["weight", "bias"]), whole_slice(model)
    set_gradients(model, slice_)
    update.apply(1, [slice_], 1.0, lambda _: None, alone)
    scheduler.step()
    before = slice_.master.clone()
    update.apply(2, [slice_], 1.0, lambda _: None, alone)
    assert torch.equal(slice_.master, before)
    assert groups[0]["params"] == ["weight", "bias"]


class PerParameter(torch.optim.Optimizer):
    """Normalises the gradient of each whole parameter, and keeps state of another shape than the parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                rows = state.setdefault("rows", torch.zeros(p.shape[0]))
                rows += p.grad.reshape(p.shape[0], -1).norm(dim=1)
                p.data = p.data - group["lr"] * p.grad / rows.sum()  # replaces the tensor instead of writing to it


def run_whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Foreign, Slice]:
    update = make_update(optimizer, groups_of(model, optimizer), ["weight", "bias"], whole=True)
    assert isinstance(update, Foreign)
    return update, whole_slice(model)


def test_a_rule_over_whole_parameters_sees_their_shapes_and_may_replace_tensors() -> None:
    reference, model = nn.Linear(8, 8), nn.Linear(8, 8)
    model.load_state_dict(reference.state_dict())
    theirs = PerParameter(reference.parameters(), lr=0.5)
    update, slice_ = run_whole(model, PerParameter(model.parameters(), lr=0.5))
    storage = slice_.master.data_ptr()
    for step in range(3):
        set_gradients(reference, slice_)
        theirs.step()
        update.apply(step + 1, [slice_], 1.0, lambda _: None, alone)
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    assert torch.equal(slice_.master, expected) and slice_.master.data_ptr() == storage
    assert slice_.low is not None and torch.equal(slice_.low, slice_.master.bfloat16())


def test_state_of_any_shape_is_saved_by_parameter_name_and_resumed() -> None:
    model = nn.Linear(8, 8)
    update, slice_ = run_whole(model, PerParameter(model.parameters(), lr=0.5))
    set_gradients(model, slice_)
    update.apply(1, [slice_], 1.0, lambda _: None, alone)
    kept = update.state_dict()
    assert {name: list(state) for name, state in kept["state"].items()} == {"weight": ["rows"], "bias": ["rows"]}
    again, copy = run_whole(model, PerParameter(model.parameters(), lr=0.5))
    again.load_state_dict(kept)  # its tensors are live in `update`, which goes on
    copy.master.copy_(slice_.master)
    for rule, mine in ((update, slice_), (again, copy)):
        mine.grad = torch.ones_like(mine.master)
        rule.apply(2, [mine], 1.0, lambda _: None, alone)
    assert torch.equal(copy.master, slice_.master)
    with pytest.raises(CheckpointError, match="whole=True"):
        again.load_state_dict({**kept, "whole": False})


def test_what_an_optimizer_keeps_is_known_on_a_rank_that_holds_nothing() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.NAdam(model.parameters())
    update = make_update(optimizer, groups_of(model, optimizer), ["weight", "bias"])
    for step in range(3):
        update.apply(step + 1, [], 1.0, lambda _: None, alone)
    state = update.state_dict()
    assert state["fields"] == [["exp_avg", "exp_avg_sq"]]
    assert float(state["scalars"][0]["step"]) == 3.0
