"""On a mesh: every way to recompute gives the bits of none, and what is kept and sent is what the formulas say."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trilithon
from trilithon import checkpointing
from trilithon.comm.collectives import Group
from trilithon.comm.ledger import all_gather_bytes, all_reduce_bytes
from trilithon.comm.mesh import make_mesh, own_process_group
from trilithon.errors import ConfigError, ProtocolError
from trilithon.models import GPT, GPTConfig
from trilithon.testing import ranks, run_ranks
from trilithon.testing.engine_run import train_on_engine
from trilithon.testing.live_bytes import LiveBytes
from trilithon.testing.parity import token_batches

VOCAB, ROWS, LENGTH, D, F32 = 61, 4, 8, 32, 4
SGD = {"kind": "adamw", "lr": 1e-2}
ALL = {"partition": True, "tier": "host", "contiguous": True}
EACH = [
    {"partition": True},
    {"tier": "host", "partition": True},
    {"contiguous": True, "partition": True, "number": 1},
    {"policy": "selective", **ALL},
    ALL,
]


class Odd(nn.Module):
    """A block with arguments of every kind and a tuple of results; dropout inside and outside the sliced region.

    x [B, T, D], mask [B, T] bool, places [T] i64 -> (x, mask, places, None)
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.inner_dropout = 0.2

    def forward(self, x: Tensor, mask: Tensor, places: Tensor, factor: float, *, name: str):
        h = F.dropout(F.gelu(self.up(self.norm(x))), self.inner_dropout, self.training)
        change = F.dropout(self.down(h), 0.1, self.training) * factor
        assert name == "odd"
        return x + change.masked_fill(mask[..., None], 0.0) + 0.01 * places[:, None], mask, places, None


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        self.blocks = nn.ModuleList(Odd() for _ in range(3))
        torch.manual_seed(11)

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask, places = self.embedding(tokens[:, :-1]), tokens[:, :-1] % 5 == 0, torch.arange(tokens.shape[1] - 1)
        for block in self.blocks:
            x, mask, places, _ = block(x, mask, places, 0.5, name="odd")
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def gpt(dropout: float = 0.1, layers: int = 2) -> GPT:
    torch.manual_seed(3)
    model = GPT(GPTConfig(vocab_size=VOCAB, context=LENGTH, num_layers=layers, width=D, num_heads=4, dropout=dropout))
    torch.manual_seed(11)
    return model


class Pairs(nn.Module):
    """The GPT here on batches of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt()

    @property
    def tp_plan(self):
        return {f"model.{name}": style for name, style in self.model.tp_plan.items()}

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens[:, :-1], tokens[:, 1:])


def digests(make, mesh, stages, manners):
    """Of two steps of two micro-batches, by stage: none first, then each manner."""
    batches = token_batches(2, ROWS, 2, length=LENGTH + 1)
    plan = {"tensor": {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}} if make is OddModel else {}
    found = []
    for stage in stages:
        for recompute in (None, *manners):
            config = {
                "zero": {"stage": stage, "bucket_numel": 3000},
                "mesh": mesh,
                **(plan if mesh.get("tensor", 1) > 1 else {}),
                "optimizer": SGD,
                "clip_norm": 0.5,
                "recompute": recompute,
            }
            run = train_on_engine(make, batches, config)
            found.append((stage, str(recompute), run.digest))
    return found


@pytest.mark.parametrize(
    ("make", "mesh", "stages", "manners"),
    [
        (OddModel, {"tensor": 1}, (0, 3), EACH[3:]),
        (OddModel, {"tensor": 2}, (0, 3), EACH),
        (OddModel, {"tensor": 4}, (1, 2), EACH[3:]),
        (OddModel, {"data": 2, "tensor": 2}, (2, 3), EACH[3:]),
        (Pairs, {"tensor": 2}, (0, 1, 2, 3), EACH[3:]),
        (Pairs, {"sequence": 2, "tensor": 2}, (3,), EACH[3:]),
    ],
    ids=lambda value: "-".join(f"{axis}{size}" for axis, size in value.items()) if isinstance(value, dict) else "",
)
def test_training_has_the_bits_of_no_recomputation(make, mesh, stages, manners):
    world_size = torch.Size(mesh.values()).numel()
    for found in run_ranks(digests, world_size, make, mesh, stages, manners, timeout_s=120):
        for stage in stages:
            rows = [row for row in found if row[0] == stage]
            assert len({digest for _, _, digest in rows}) == 1, rows


def measure_all(degree, manners):
    return [measure(degree, recompute) for recompute in manners]


def measure(degree, recompute):
    """Of a step after the first: bytes by kind; by slope over layers after its forward, what is alive, what is kept on
    the host and on the device; and what is kept at its end."""
    slopes = []
    for layers in (2, 4):
        settings = {"mesh": {"tensor": degree}, "recompute": recompute, "optimizer": SGD, "batch": {"micro_size": ROWS}}
        with trilithon.initialize(gpt(dropout=0.0, layers=layers), settings) as engine:
            tokens = torch.arange(ROWS * (LENGTH + 1)).view(ROWS, -1) % VOCAB
            batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            engine.train_step([batch])
            engine.hooks.clear()
            before = sent_between_tensor_ranks(engine)
            with LiveBytes() as live:
                loss = engine(*batch)
                gc.collect()
                slopes.append((live.bytes, engine.memory_by_tier()))
            engine.backward(loss)
            engine.step()
            sent = {kind: size - before[kind] for kind, size in sent_between_tensor_ranks(engine).items()}
            spare = engine.memory().get("checkpoints", 0)
    rows = [
        (live, *(tiers.get(tier, {}).get("checkpoints", 0) for tier in ("host", "device"))) for live, tiers in slopes
    ]
    return sent, *((many - few) // 2 for few, many in zip(*rows, strict=True)), spare


def sent_between_tensor_ranks(engine):
    return {kind: engine.ledger.sent_bytes(kind, "tensor") for kind in ("all_reduce", "all_gather")}


@pytest.mark.parametrize("degree", [2, 4])
def test_memory_and_bytes_are_those_of_the_formulas(degree):
    unit = ROWS * LENGTH * D * F32  # B T D: the input of a block
    part = all_gather_bytes(unit // F32 // degree, F32, degree)
    layers = 4
    sum_of_all = all_reduce_bytes(unit // F32, F32, degree)
    loss = all_reduce_bytes(ROWS * LENGTH, F32, degree) + all_reduce_bytes(2 * ROWS * LENGTH, F32, degree)
    full = 6 * layers + 2  # of them two a block that are needed again
    rows = [  # manner, live bytes, on the host and on the device, by layer; sums; gathers
        ({}, unit, 0, unit, full, 0),
        ({"partition": True}, unit // degree, 0, unit // degree, full, layers),
        ({"tier": "host"}, None, unit, 0, full, 0),
        ({"tier": "host", "partition": True, "contiguous": True}, None, unit // degree, 0, full, layers),
        ({"partition": True, "contiguous": True}, 0, 0, unit // degree, full, layers),
        ({"policy": "selective", "partition": True}, None, 0, unit // degree, 4 * layers + 2, layers),
    ]
    for found in run_ranks(measure_all, degree, degree, [row[0] for row in rows]):
        for (recompute, live, host, device, sums, gathers), measured in zip(rows, found, strict=True):
            sent, live_slope, host_slope, device_slope, spare = measured
            assert sent["all_reduce"] == sums * sum_of_all + loss, recompute
            assert sent["all_gather"] == gathers * part, recompute
            assert (host_slope, device_slope) == (host, device), recompute
            assert live is None or live_slope == live, recompute
            if recompute.get("contiguous"):  # the buffers stay, and no others were made
                assert spare == layers * unit // degree, recompute


@ranks(2)
def test_inputs_that_differ_between_tensor_ranks_are_told_on_all(world_size):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.activation, self.scale = nn.GELU(), nn.Linear(1, 1)

        def forward(self, x):
            return self.activation(x)

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.inner, self.down = nn.Linear(D, 2 * D), Inner(), nn.Linear(2 * D, D)

        def forward(self, x):
            return self.down(self.inner(self.up(x))).square().mean()

    config = {
        "mesh": {"tensor": 2},
        "tensor": {"plan": {"up": "column", "down": "row"}},
        "recompute": {"classes": ["Inner"], "partition": True},
        "optimizer": SGD,
        "batch": {"micro_size": 3},
    }
    with trilithon.initialize(Cut(), config) as engine:
        with pytest.raises(ProtocolError, match=r"input of shape \(3, 32\) of the recomputed block inner differs"):
            engine(torch.randn(3, D))


@ranks(2)
def test_a_partition_of_cut_tokens_is_refused(world_size):
    config = {"mesh": {"tensor": 2}, "tensor": {"cut_norms": True}, "recompute": {"partition": True}}
    with pytest.raises(ConfigError, match=r"with tensor\.cut_norms that is all a rank has.*Leave recompute\.partition"):
        trilithon.initialize(gpt(), {**config, "optimizer": SGD})


@ranks(1, 2, 4)
def test_a_model_that_asks_itself_over_a_group_of_its_own(world_size):
    """Odd sizes (15 elements over 2 and 4 ranks), one tensor read by two calls, and half precision."""
    group = Group(own_process_group(make_mesh(), "data"), name="tensor")
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 5), torch.randn(3, 5).requires_grad_()

    def run(call):
        y = call(lambda a, b: (torch.tanh(layer(a)), b), x, 7)[0]
        return torch.autograd.grad((call(layer, x) * y).sum(), [x, layer.weight])

    expected = run(lambda function, *args: function(*args))
    for settings in ({"partition": True}, ALL):
        checkpointing.configure(settings, group=group, num_layers=2)
        with group.ledger.measure() as sent:
            got = run(checkpointing.checkpoint)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        assert sent.all_gather_bytes == 2 * all_gather_bytes(-(-15 // world_size), F32, world_size)
        half = torch.randn(3, 5).to(torch.bfloat16).requires_grad_()
        checkpointing.checkpoint(torch.tanh, half).sum().backward()
        assert torch.equal(half.grad, torch.autograd.grad(torch.tanh(half).sum(), half)[0])
    checkpointing.unconfigure()
