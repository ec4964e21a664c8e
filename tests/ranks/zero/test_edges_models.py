"""Models as people write them, at every stage: each trains like plain PyTorch on one process.

All of them map x [B, 16] and target [B, 4] to a loss.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from against_plain import STAGES, assert_trains_like_plain, engine_for, train_engine
from trilithon.testing import ranks
from trilithon.testing.models import SharedLayerNet
from trilithon.testing.parity import vector_batches


class FunctionalTiedHead(nn.Module):
    """The input layer's weight is used again by the head, from the root's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.middle = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return F.mse_loss(self.out(F.linear(hidden, self.first.weight.t())), target)


class Affine(nn.Module):
    """Leaves the addition of its bias to the caller, as some attention projections do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.2)
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> tuple[Tensor, nn.Parameter]:
        return x @ self.weight, self.bias


class ReturnedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine = Affine()
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden, bias = self.affine(x)
        return F.mse_loss(self.out(torch.tanh(hidden + bias)), target)


class Containers(nn.Module):
    """Parameters and layers inside containers that have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(16) * 0.3) for _ in range(3)])
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(16)), "b": nn.Parameter(torch.ones(()))})
        self.layers = nn.ModuleDict({"one": nn.Linear(16, 16), "two": nn.Linear(16, 16)})
        self.nested = nn.ModuleList([nn.ModuleList([nn.Linear(16, 4)])])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for row in self.rows:
            x = torch.tanh(x + row)
        x = self.layers["two"](torch.tanh(self.layers["one"](x * self.scales["a"]))) * self.scales["b"]
        return F.mse_loss(self.nested[0][0](x), target)


class TiedModules(nn.Module):
    """One module under two names, one weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.two = nn.Sequential(self.one, nn.Linear(16, 16))
        self.three = nn.Linear(16, 16)
        self.three.weight = self.two[1].weight
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.out(torch.tanh(self.three(self.two(self.one(x))))), target)


class Sizes(nn.Module):
    """Nothing, one element, no dimension, and fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.none = nn.Parameter(torch.zeros(0))
        self.one = nn.Parameter(torch.ones(1))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.two = nn.Parameter(torch.ones(2))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = torch.cat([x, self.empty.sum(0).expand(len(x), 5)], 1)[:, :16] * self.one + self.none.sum()
        return F.mse_loss(self.out(x) * self.scalar * self.two.prod(), target)


class Doubles(nn.Module):
    """An fp64 layer among fp32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.exact = nn.Linear(16, 16).double()
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.out(torch.tanh(self.exact(self.first(x).double())).float()), target)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(24, 4).t() * 0.2)
        assert not self.conv.weight.is_contiguous() and not self.transposed.is_contiguous()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        image = x.view(-1, 4, 2, 2).to(memory_format=torch.channels_last)
        return F.mse_loss(torch.tanh(self.conv(image)).flatten(1) @ self.transposed.t(), target)


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 16, sparse=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.out(self.rows((x[:, :3].abs() * 4).long().clamp(max=9)).mean(1) + x), target)


class MaybeUsed(nn.Module):
    """`sometimes` gets a gradient where the data says so: on some ranks; `never` is called nowhere.

    Backward gathers what it needs, so at stage 3 `sometimes` has to stay gathered.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.sometimes = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)
        self.threshold = threshold

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        mixed = self.sometimes(hidden)
        if x[0, 0] > self.threshold:
            hidden = hidden + mixed
        return F.mse_loss(self.out(hidden), target)


class UsedByNobody(MaybeUsed):
    """`sometimes` is called everywhere, and its output used nowhere."""

    def __init__(self) -> None:
        super().__init__(threshold=1e9)


@dataclass
class Result:
    loss: Tensor
    hidden: list[Tensor]


class Answer:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Outputs(nn.Module):
    """Every layer wraps its output in something else."""

    class Layer(nn.Module):
        def __init__(self, kind: str, size: int) -> None:
            super().__init__()
            self.kind, self.linear = kind, nn.Linear(16, size)
            self.scale = nn.Parameter(torch.ones(size))

        def forward(self, x: Tensor) -> object:
            y = torch.tanh(self.linear(x)) * self.scale
            match self.kind:
                case "dataclass":
                    return Result(y.mean(), [y])
                case "object":
                    return Answer(y)
                case "dict":
                    return OrderedDict(logits=y, other=None)
            return [(y,)]

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = self.Layer("dataclass", 16), self.Layer("object", 16)
        self.c, self.d = self.Layer("dict", 16), self.Layer("list", 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        first = self.a(x)
        y = self.c(self.b(first.hidden[0]).value)["logits"]
        return F.mse_loss(self.d(y)[0][0], target) + first.loss


class NestedObject(nn.Module):
    """A layer returns tensors inside objects inside objects."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Answer:
            return Answer({"deep": [Answer(torch.tanh(self.linear(x)) * self.scale)]})

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = self.Layer(), nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.out(self.layer(x).value["deep"][0].value), target)


class SideLoss(nn.Module):
    """Layers leave an auxiliary loss on themselves; backward enters them from there, or from both sides."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.linear = nn.Linear(16, 3), nn.Linear(16, 16)
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.linear(x)) * self.scale
            self.aux = F.linear(y * self.scale, self.gate.weight).square().mean()
            return y

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        main = F.mse_loss(self.out(x), target)
        return main + 0.1 * torch.stack([layer.aux for layer in self.layers]).sum()


class SideLossOnly(SideLoss):
    """The loss is the side output alone: nothing else ever enters the layers."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        super().forward(x, target)
        return torch.stack([layer.aux for layer in self.layers]).sum()


class SideLossKept(SideLoss):
    """The side outputs go into an object that the model, not the layer, keeps; they come last in forward."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        collected = []
        for layer in self.layers:
            x = layer(x)
            collected.append(layer.aux)
        return sum(collected[1:], collected[0]) * 0.1 + F.mse_loss(self.out(x), target)


class InputModified(nn.Module):
    """In-place activations after layers, and outputs changed in place by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = F.relu(self.a(x), inplace=True)
        y = self.b(y)
        y += 1.0
        y.mul_(0.5)
        return F.mse_loss(self.out(y), target)


class BatchNormed(nn.Module):
    """Buffers that change in evaluation order only: one rank's statistics are its own, so compare with momentum off."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.out = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.out(self.norm(self.a(x)) * self.scale), target)


class Recurrent(nn.Module):
    """LSTM keeps its weights in a list of its own beside the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 8, num_layers=2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.out(self.lstm(x.view(-1, 4, 4))[0][:, -1]), target)


class WeightNormed(nn.Module):
    """torch's parametrizations compute the weight from parameters of a child module."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.out(torch.tanh(self.a(x))), target)


class Attention(nn.Module):
    """nn.MultiheadAttention reads its children's weights without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True, bias=False)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, bias=False)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = x.view(-1, 4, 4)
        y = self.encoder(self.attend(y, y, y, need_weights=False)[0] + y)
        return F.mse_loss(self.out(y.flatten(1)), target)


MODELS = [
    FunctionalTiedHead, ReturnedBias, Containers, TiedModules, Sizes, Doubles, ChannelsLast, SparseEmbedding, MaybeUsed,
    UsedByNobody,
    Outputs, NestedObject, SideLoss, SideLossOnly, SideLossKept, InputModified, BatchNormed, Recurrent, WeightNormed,
    Attention, SharedLayerNet,
]  # fmt: skip


def seeded(model_class: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return model_class()


@ranks(2)
@pytest.mark.parametrize("name", [model.__name__ for model in MODELS])
def test_trains_like_plain(name):
    make = next(model for model in MODELS if model.__name__ == name)
    for stage in STAGES:
        zero = {"keep_gathered": ["sometimes"]} if make is MaybeUsed else {}
        assert_trains_like_plain(lambda: seeded(make), stage, accumulation=2, zero=zero)


@ranks(3)
@pytest.mark.parametrize("name", ["Sizes", "Containers", "UsedByNobody", "SideLoss", "ChannelsLast"])
def test_trains_like_plain_on_three_ranks(name):
    make = next(model for model in MODELS if model.__name__ == name)
    for stage in (2, 3):
        assert_trains_like_plain(lambda: seeded(make), stage)


@ranks(2)
@pytest.mark.parametrize("name", ["FunctionalTiedHead", "ReturnedBias", "SideLoss", "TiedModules", "UsedByNobody"])
@pytest.mark.parametrize(
    "zero",
    [
        {"reshard_after_forward": False},
        {"prefetch_numel": 0, "overlap": False},
        {"bucket_numel": 10_000},
        {"persist_below_numel": 20},
    ],
    ids=lambda zero: next(iter(zero)),
)
def test_trains_like_plain_under_other_settings(name, zero):
    make = next(model for model in MODELS if model.__name__ == name)
    assert_trains_like_plain(lambda: seeded(make), 3, zero=zero)


@ranks(2, 3)
@pytest.mark.parametrize(("accumulation", "stages"), [(1, (0, 1, 2, 3)), (2, (0, 1)), (2, (2, 3))])
def test_fp32_training_gives_the_same_bits(accumulation, stages, world_size):
    """Whatever the stage, the size of buckets and units, and the overlap: sums are in the order of the ranks.

    Stages 0 and 1 add micro-batches before they add ranks, 2 and 3 after: with several, they agree in pairs.
    """
    batches = vector_batches(2, 2 * world_size, accumulation)
    settings = [{"stage": stage, "bucket_numel": numel} for stage in stages for numel in (1, 400, None)]
    settings += [{"stage": stage, "overlap": False} for stage in stages]
    expected: dict[str, Tensor] = {}
    for zero in settings:
        engine = engine_for(seeded(Containers), zero["stage"], accumulation=accumulation, zero=zero)
        train_engine(engine, batches)
        got = dict(engine.full_parameters())
        engine.close()
        expected = expected or got
        assert all(torch.equal(got[name], value) for name, value in expected.items()), zero
