"""`zero.gathered`: whole values for a while, and no write that is lost or differs between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trilithon
from against_plain import STAGES, engine_for, train_engine
from trilithon.errors import ProtocolError, ShardedParameterError
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import vector_batches

gathered = trilithon.zero.gathered


@ranks(2, 3)
def test_values_can_be_read():
    for stage in STAGES:
        plain, model = MLP(), MLP()
        with engine_for(model, stage) as engine:
            with gathered(model):
                assert all(type(p) is nn.Parameter for p in model.parameters())
                for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
                    assert torch.equal(p, expected), name
                assert torch.equal(model(torch.ones(2, 16)), plain(torch.ones(2, 16)))
            train_engine(engine, vector_batches(1, 2 * engine.world_size))
            whole = engine.state_dict()
            with gathered([model.last.weight]):
                assert torch.equal(model.last.weight, whole["last.weight"])
            if engine._sharding.stage == 3:
                with pytest.raises(ShardedParameterError):
                    model.last.weight.sum()


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("writer", [0, 1])
def test_what_one_rank_writes_is_what_training_goes_on_from(precision, writer):
    target = torch.arange(64.0).view(4, 16) / 8
    for stage in STAGES:
        model = MLP()
        with engine_for(model, stage, precision=precision) as engine:
            train_engine(engine, vector_batches(1, 2 * engine.world_size))
            with gathered(model.last.weight, modify=writer):
                with torch.no_grad():
                    model.last.weight.copy_(target if engine.rank == writer else -target)
            others = {n: p for n, p in engine.full_parameters() if n != "last.weight"}
            assert torch.equal(dict(engine.full_parameters())["last.weight"], target)
            assert torch.equal(dict(engine.view("param"))["last.weight"].float(), target)
            with gathered(model.last.weight, modify=writer):
                model.last.weight.data.mul_(0.5)
            assert torch.equal(dict(engine.view("master"))["last.weight"], target / 2)
            x = torch.ones(1, 16)
            assert torch.isfinite(engine.eval_step((x,))).all()
            assert all(torch.equal(others[n], p) for n, p in engine.full_parameters() if n in others)
            before = dict(engine.full_parameters())["last.weight"]
            train_engine(engine, vector_batches(1, 2 * engine.world_size))
            moved = (dict(engine.full_parameters())["last.weight"] - before).norm()
            assert 0 < moved < 2.0, moved  # a step from the new values, not a return to the old ones


@ranks(2)
def test_a_write_keeps_the_masters_of_what_was_not_written():
    """Under bf16 a master has more digits than what forward reads: opening for writing must not round it."""
    for stage in STAGES:
        model = MLP()
        with engine_for(model, stage, precision="bf16") as engine:
            train_engine(engine, vector_batches(2, 4))
            before = dict(engine.full_parameters())
            with gathered(model, modify=0):
                with torch.no_grad():
                    model.last.weight[1, 3] = 2.0
            for name, after in engine.full_parameters():
                changed = (after != before[name]).nonzero().tolist()
                assert changed == ([[1, 3]] if name == "last.weight" else []), (stage, name, changed)


@ranks(2)
@pytest.mark.parametrize("how", ["in_place", "data", "one_rank"])
def test_a_write_without_modify_raises_everywhere(how):
    for stage in STAGES:
        model = MLP()
        with engine_for(model, stage) as engine:
            before = dict(engine.full_parameters())
            with pytest.raises(ProtocolError, match=r"last\.weight.*modify=0"):
                with gathered([model.last.weight, model.last.bias]):
                    if how == "in_place":
                        with torch.no_grad():
                            model.last.weight[1:] += 1
                    elif how == "data" or engine.rank == 1:
                        model.last.weight.data.zero_()
            assert all(torch.equal(before[n], p) for n, p in engine.full_parameters()), stage
            assert all(torch.equal(before[n], p) for n, p in engine.view("param")), stage
            train_engine(engine, vector_batches(2, 4))


@ranks(2)
def test_an_exception_inside_passes_through_and_leaves_the_engine_usable():
    for stage in STAGES:
        for modify in (None, 0):
            model = MLP()
            with engine_for(model, stage) as engine:
                with pytest.raises(KeyError, match="mine"):
                    with gathered(model, modify=modify):
                        raise KeyError("mine")
                train_engine(engine, vector_batches(2, 4))


@ranks(2)
def test_an_exception_after_a_write_gives_the_old_values_back():
    for stage in STAGES:
        model = MLP()
        with engine_for(model, stage) as engine:
            before = dict(engine.full_parameters())
            with pytest.raises(KeyError, match="mine"):
                with gathered(model, modify=0):
                    model.last.weight.data.zero_()
                    raise KeyError("mine")
            assert all(torch.equal(before[n], p) for n, p in engine.view("param")), stage


@ranks(2)
def test_contexts_nest():
    for stage in STAGES:
        model = MLP()
        with engine_for(model, stage) as engine:
            with gathered(model):
                with gathered(model.last, modify=1):
                    with torch.no_grad():
                        model.last.weight.fill_(engine.rank)
                assert bool((model.last.weight == 1).all())
                with gathered(model.layers):
                    model.layers[0].weight.sum()
                model.layers[0].weight.sum()
            assert bool((dict(engine.full_parameters())["last.weight"] == 1).all())


@ranks(2)
def test_what_can_be_passed():
    for stage in STAGES:
        model = MLP()
        loose = nn.Parameter(torch.ones(3))
        with gathered(model, modify=0), gathered([loose]):  # before there is an engine: whole, yours, left alone
            model.last.weight.data.mul_(2)
        doubled = model.last.weight.detach().clone()
        with engine_for(model, stage) as engine:
            with gathered([]), gathered([], modify=0):
                pass
            with gathered(p for p in model.parameters() if p.dim() == 1):
                model.last.bias.sum()
            with gathered([model.last.weight, model.last.weight, loose], modify=0):
                model.last.weight.sum()
            with gathered(model.parameters()):
                assert torch.equal(model.last.weight, doubled)
            for wrong in (["last.weight"], [None], [model.last], 3, "last.weight", None):
                with pytest.raises(ProtocolError, match="takes a parameter, a module, or an iterable"):
                    with gathered(wrong):
                        pass
            for rank in (2, -1, True, "0"):
                with pytest.raises(ProtocolError, match="modify"):
                    with gathered(model, modify=rank):
                        pass
            train_engine(engine, vector_batches(1, 4))
        with gathered(model):  # after it closed
            model.last.weight.sum()


@ranks(2)
def test_optimizer_state_survives_a_write():
    """Momentum goes on: the next step equals that of a plain run in which the weights are overwritten in between."""
    batches = vector_batches(3, 4)
    plain = MLP()
    update = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step, ((x, target),) in enumerate(batches):
        update.zero_grad()
        plain(x, target).backward()
        update.step()
        if step == 0:
            plain.last.weight.data.mul_(0.5)
    for stage in STAGES:
        model = MLP()
        with engine_for(model, stage) as engine:
            train_engine(engine, batches[:1])
            with gathered(model.last.weight, modify=0):
                model.last.weight.data.mul_(0.5)
            train_engine(engine, batches[1:])
            for (name, got), expected in zip(engine.full_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-6, msg=f"{stage} {name}")


@ranks(2)
def test_frozen_parameters_can_be_read_and_written():
    for stage in STAGES:
        model = MLP()
        model.layers.requires_grad_(False)
        with engine_for(model, stage, precision="bf16") as engine:
            with gathered(model.layers, modify=1):
                model.layers[0].weight.data.fill_(dist.get_rank())
            with gathered(model.layers):
                assert bool((model.layers[0].weight == 1).all())
            assert bool((engine.state_dict()["layers.0.weight"] == 1).all())


class ReadsInside(nn.Module):
    """The head's weight is read under `gathered` by a module that is not its own, and needed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        with gathered(self.head.weight):
            out = hidden @ self.head.weight.T
        return (out - target).square().mean()


@ranks(2)
def test_what_is_opened_inside_a_forward_is_there_again_in_its_backward():
    batches = vector_batches(2, 4)
    plain = ReadsInside()
    update = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for ((x, target),) in batches:
        update.zero_grad()
        plain(x, target).backward()
        update.step()
    for stage in STAGES:
        with engine_for(ReadsInside(), stage) as engine:
            train_engine(engine, batches)
            for (name, got), expected in zip(engine.full_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-6, msg=f"{stage} {name}")
