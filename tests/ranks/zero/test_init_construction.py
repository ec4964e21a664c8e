"""`zero.init`: models cut while they are built start with the values that an ordinary construction gives rank 0."""

# ruff: noqa: PLW0108  (a lambda reads the attribute when it is called, inside pytest.raises)
from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import trilithon
from against_plain import STAGES, assert_trains_like_plain, engine_for
from trilithon.errors import ConfigError, ProtocolError, ShardedParameterError
from trilithon.testing import ranks
from trilithon.zero.init import Builder
from trilithon.zero.sharded_parameter import find_owner

init, gathered = trilithon.zero.init, trilithon.zero.gathered


class Base(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width, padding_idx=0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, 4)
        self.register_buffer("counter", torch.arange(4.0))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x + self.embedding((x.abs() * 4).long().clamp(max=9)[:, 0])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(self.out(x) + self.counter, target)


class LoopsAfterwards(Base):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)
            else:
                nn.init.constant_(parameter, 0.1)


class Applies(Base):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self._start)

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.3)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.1)
            module.weight.data[module.padding_idx].zero_()


class WritesRows(Base):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.out.weight[1] = 2.0
            self.embedding.weight[3:5].copy_(torch.ones(2, 16))
            self.layers[0].weight.mul_(self.layers[1].weight.std())
        self.out.bias.data = torch.full((4,), 0.25)
        self.layers[2].weight = nn.Parameter(self.layers[1].weight.clone() * 2)


class Ties(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[2] = self.layers[0]
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(x, target) + self.head(x).square().mean()


class HoldsAliases(Base):
    """Writes through aliases that were taken before other modules were built."""

    def __init__(self) -> None:
        super().__init__()
        data = self.layers[0].weight.data
        row = self.layers[1].weight.detach()[2]
        view = self.embedding.weight.data.view(-1)
        more = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        data.fill_(0.125)
        row.zero_()
        view[5:9] = 3.0
        self.layers[0].weight.data[0] += more[3].weight.data.mean()
        data[3].mul_(2.0)


class Meta(Base):
    """A part is built on the meta device inside the context, and given values later."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.part = nn.Linear(16, 4)
        self.part.to_empty(device="cpu")
        nn.init.constant_(self.part.weight, 0.5)
        nn.init.constant_(self.part.bias, 0.5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(x, target) + self.part(x).mean()


class Casts(Base):
    """Changes type and back, moves, and freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].double()
        self.layers[0].float()
        self.layers[1].to("cpu")
        self.layers[1].requires_grad_(False)
        self.out.weight.requires_grad = True


class Varied(Base):
    """Shapes that do not split, memory formats, recurrent weights, parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0))
        self.three = nn.Parameter(torch.randn(3))
        self.conv = nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(16, 3).t())
        self.lstm = nn.LSTM(16, 16)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.attention = nn.MultiheadAttention(16, 2)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x + self.normed(self.lstm(x[None])[0][0]) * self.scalar + (self.three @ self.transposed)
        x = self.conv(x.view(-1, 4, 2, 2)).flatten(1) + self.empty.sum()
        x = self.attention(x[None], x[None], x[None])[0][0]
        return super().forward(x, target)


class DrawsFromEverywhere(Base):
    """Initial values from torch, numpy and random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight.data.fill_(random.random())
        self.layers[1].weight.data.copy_(torch.from_numpy(np.random.randn(16, 16)))
        self.layers[2].weight = nn.Parameter(torch.randn(16, 16) * 0.1)


class LoadsState(Base):
    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict({name: torch.full_like(value, 0.25) for name, value in self.state_dict().items()})


MODELS = [
    Base, LoopsAfterwards, Applies, WritesRows, Ties, HoldsAliases, Meta, Casts, Varied, DrawsFromEverywhere, LoadsState
]  # fmt: skip


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def built(make: type[nn.Module], *, open_numel: int | None = None, rank_seed: bool = True) -> nn.Module:
    seed(11 + (dist.get_rank() if rank_seed else 0))
    with init(**({} if open_numel is None else {"open_numel": open_numel})):
        return make()


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", [model.__name__ for model in MODELS])
def test_values_are_those_of_an_ordinary_construction(name):
    """Each rank is seeded differently: rank 0's values count."""
    make = next(model for model in MODELS if model.__name__ == name)
    seed(11)
    plain = make()
    for open_numel in (None, 600) if make is Varied else (None, 600, 0):  # weight_norm wraps a parameter in another
        model = built(make, open_numel=open_numel)
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        for (n, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.shape, p.dtype, p.requires_grad) == (expected.shape, expected.dtype, expected.requires_grad), n
        with gathered(model):
            for (n, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(p, expected), (n, open_numel)
        for (n, b), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert type(b) is torch.Tensor and torch.equal(b, expected), n


@ranks(2, 3)
@pytest.mark.parametrize("name", [model.__name__ for model in MODELS])
def test_what_was_built_in_slices_trains_like_plain(name):
    make = next(model for model in MODELS if model.__name__ == name)

    def plain() -> nn.Module:
        seed(11)
        return make()

    for stage in STAGES:
        assert_trains_like_plain(plain, stage, steps=2, change=lambda _: built(make, open_numel=300))


@ranks(2)
def test_random_states_of_the_ranks_are_their_own_again():
    rank = dist.get_rank()
    seed(20 + rank)
    expected = [torch.rand(3) for _ in range(2)][1] if rank == 0 else torch.rand(3)
    numbers = random.random(), np.random.rand()
    seed(20 + rank)
    with init():
        nn.Parameter(torch.rand(3))
    assert torch.equal(torch.rand(3), expected)
    assert (random.random(), np.random.rand()) == numbers


@ranks(2)
def test_reading_outside_raises_and_says_what_to_do():
    model = built(Base)
    for read in (lambda: model.out.weight.sum(), lambda: model(torch.ones(2, 16), torch.ones(2, 4)), model.state_dict):
        with pytest.raises(
            ShardedParameterError, match=r"(Linear|Embedding)\.weight.*zero\.init\(\).*gathered\(params\)"
        ):
            read()
    assert (model.out.weight.shape, model.out.weight.numel()) == ((4, 16), 64)
    with gathered(model.out):
        assert bool(model.out.weight.isfinite().all())
    with pytest.raises(ShardedParameterError):
        model.out.weight.sum()


@ranks(2)
def test_gathered_works_on_models_without_an_engine():
    model = built(Base)
    with gathered(model.out.weight, modify=1):
        model.out.weight.data.fill_(dist.get_rank())
    with pytest.raises(ProtocolError, match=r"Linear\.weight.*modify=0"):
        with gathered(model.out.weight):
            if dist.get_rank() == 1:
                model.out.weight.data.fill_(7)
    with pytest.raises(KeyError):
        with gathered(model.out.weight, modify=0):
            model.out.weight.data.fill_(9)
            raise KeyError
    with pytest.raises(ShardedParameterError):
        model.out.weight.sum()
    with gathered(model.out.weight):
        with gathered(model):
            assert bool((model.out.weight == 1).all())
        assert bool((model.out.weight == 1).all())
    engine = engine_for(model, 3)
    assert bool((dict(engine.full_parameters())["out.weight"] == 1).all())
    engine.close()


@ranks(2)
def test_contexts_nest_and_an_inner_one_changes_nothing():
    seed(11)
    plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(4, 4))
    seed(11)
    with init():
        first = nn.Linear(16, 16)
        with init():
            second = nn.Linear(16, 4)
            nn.init.zeros_(second.bias)
            first.weight.data.sum()
        nn.init.ones_(second.bias)
        third = nn.Linear(4, 4)
    plain[1].bias.data.fill_(1.0)
    model = nn.Sequential(first, second, third)
    with gathered(model):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@ranks(2)
def test_two_models_in_two_contexts_and_one_engine():
    a = built(Base)
    b = built(Base)
    both = nn.ModuleDict({"a": a, "b": b})
    engine = engine_for(both, 3)
    values = dict(engine.full_parameters())
    assert torch.equal(values["a.out.weight"], values["b.out.weight"])
    engine.close()
    with init():
        c = nn.Linear(16, 4)
        c.weight.data.copy_(a.out.weight)
    with gathered(c.weight):
        assert torch.equal(c.weight, values["a.out.weight"])


@ranks(2)
def test_reading_a_model_of_an_earlier_context_inside_a_later_one():
    """Distilling, or copying a pretrained part: the other model is cut as well and only readable in gathered()."""
    teacher = built(Base)
    with init():
        student = nn.Linear(16, 4)
        with pytest.raises(ShardedParameterError, match="gathered"):
            student.weight.data.copy_(teacher.out.weight)
        with gathered(teacher.out):
            student.weight.data.copy_(teacher.out.weight)
    with gathered([student.weight, teacher.out.weight]):
        assert torch.equal(student.weight, teacher.out.weight)


@ranks(2)
def test_not_enabled_does_nothing():
    with init(enabled=False):
        layer = nn.Linear(4, 4)
    assert type(layer.weight) is nn.Parameter and layer.weight.sum().isfinite()


def test_one_process_builds_an_ordinary_model():
    with init():
        layer = nn.Linear(4, 4)
    assert type(layer.weight) is nn.Parameter and layer.weight.sum().isfinite()


@ranks(2)
def test_an_exception_in_a_constructor_passes_through():
    with pytest.raises(KeyError, match="mine"):
        with init():
            nn.Linear(4, 4)
            raise KeyError("mine")
    assert type(nn.Linear(4, 4).weight) is nn.Parameter
    model = built(Base)
    with gathered(model):
        model.out.weight.sum()


@ranks(2)
def test_a_model_on_the_meta_device_gets_the_values_of_an_ordinary_construction():
    """Built on meta, outside and inside of the context: initialize() runs each module's own reset_parameters."""
    seed(11)
    plain = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))

    def on_meta_inside() -> nn.Module:
        with init():
            return on_meta()

    for stage in STAGES:
        for make in (on_meta, on_meta_inside):
            seed(11)
            engine = engine_for(make(), stage)
            for (name, value), expected in zip(engine.full_parameters(), plain.parameters(), strict=True):
                assert torch.equal(value, expected), (stage, make.__name__, name)
            engine.close()

    class NoReset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    for stage in STAGES:
        with pytest.raises(ConfigError, match=r"'weight' is on the meta device.*reset_parameters"):
            engine_for(NoReset(), stage)


class Peak:
    """Sees every whole element that exists at once: sizes of live tensors of at least `least` elements."""

    def __init__(self, least: int) -> None:
        self.least, self.most = least, 0

    def sample(self) -> None:
        found: dict[int, int] = {}
        for tensor in gc.get_objects():
            if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_floating_point():
                storage = tensor.untyped_storage()
                if storage.nbytes() // 4 >= self.least:
                    found[storage.data_ptr()] = storage.nbytes() // 4
        self.most = max(self.most, sum(found.values()))


@ranks(2)
@pytest.mark.parametrize("open_numel", [0, 3000])
def test_few_whole_elements_exist_during_construction(open_numel):
    """At most `open_numel`, the parameter at hand, and while it is registered its fresh copy."""
    peak = Peak(1000)

    class Sampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList()
            for _ in range(12):
                self.layers.append(nn.Linear(32, 32, bias=False))
                peak.sample()
            for layer in self.layers:
                nn.init.ones_(layer.weight)
                peak.sample()
            self.apply(self._start)

        def _start(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.data.normal_()
                peak.sample()

    with init(open_numel=open_numel):
        model = Sampled()
    assert 0 < peak.most <= open_numel + 2 * 1024, peak.most
    peak.most = 0
    gc.collect()
    peak.sample()
    assert peak.most == 0, "whole values stay behind after the context"
    del model


@ranks(2)
def test_parameters_that_go_away_take_their_slices_with_them():
    with init(open_numel=0):
        kept = nn.Linear(8, 8)
        for _ in range(20):
            nn.Linear(64, 64)
        gc.collect()
        owner = find_owner(kept.weight)
        assert isinstance(owner, Builder)
        assert len(owner._shards) + len(owner._open) <= 3
