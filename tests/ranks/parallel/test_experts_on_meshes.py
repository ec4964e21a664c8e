"""Experts on a mesh with a tensor axis train as they do on the data axis alone, and no token is sent twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trilithon.engine.build import initialize
from trilithon.errors import ConfigError
from trilithon.parallel.moe import MoE
from trilithon.testing import ranks, run_ranks

WIDTH, INNER, EXPERTS, STEPS = 8, 16, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return out


class Mixed(nn.Module):
    """A dense block, which is cut, and experts, which are not."""

    def __init__(self, ep_size: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, Block(), EXPERTS, ep_size=ep_size, k=1, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(self.norm(x))
        change, balance, _ = self.moe(x)
        return (x + change).square().mean() + 0.1 * balance


def train(mesh, stage, ep_size=2, moe=None, **options):
    config = {
        "moe": moe or {},
        "mesh": mesh,
        "zero": {"stage": stage},
        "optimizer": {"kind": "adam", "lr": 1e-2, "eps": 1e-6},
        "clip_norm": 0.05,
        "batch": {"micro_size": 6},
    }
    with initialize(Mixed(ep_size, **options), config) as engine:
        generator = torch.Generator().manual_seed(1)
        losses, norms = [], []
        for _ in range(STEPS):
            batch = torch.randn(12, WIDTH, generator=generator)
            losses.append(engine.train_step([batch[engine.mesh.data_rank * 6 :][:6]]))
            norms.append(engine.grad_norm)
        return losses, norms, {name: value.clone() for name, value in engine.full_parameters()}, len(engine.slices)


DROPLESS = {"drop_tokens": False}
CROWDED = {"capacity_factor": 0.5, "min_capacity": 1, "drop_policy": "position"}


@pytest.mark.parametrize(
    ("stage", "ep_size", "options"),
    [
        (0, 1, DROPLESS), (0, 2, DROPLESS), (0, 4, CROWDED), (2, 4, DROPLESS), (2, 1, CROWDED), (3, 1, CROWDED),
        (3, 2, DROPLESS), (3, 4, DROPLESS),
    ],
)  # fmt: skip
def test_experts_and_tensor_slices_on_one_mesh(stage, ep_size, options):
    """Tensor ranks share out the tokens and may share out the experts; the model is that of the data axis alone."""
    alone = run_ranks(train, 2, {"data": 2}, stage, min(ep_size, 2), **options)[0]
    for losses, norms, parameters, num_cut in run_ranks(train, 4, {"data": 2, "tensor": 2}, stage, ep_size, **options):
        assert num_cut == 3  # two matrices and the bias between them
        assert losses == pytest.approx(alone[0], rel=1e-6) and norms == pytest.approx(alone[1], rel=1e-6)
        for name, value in alone[2].items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [DROPLESS, CROWDED])
def test_in_two_steps_and_with_the_other_order_of_ranks(options):
    """Expert groups of all four ranks on nodes of two; pairs that are not neighbours."""
    mesh = {"data": 2, "tensor": 2}
    flat = run_ranks(train, 4, mesh, 2, 4, **options)[0]
    two = run_ranks(train, 4, mesh, 2, 4, {"all_to_all": "hierarchical", "node_size": 2}, **options)[0]
    assert two[:2] == flat[:2]
    assert all(torch.equal(two[2][name], value) for name, value in flat[2].items())
    apart = run_ranks(train, 4, mesh, 2, 2, {"data_before_experts": True}, **options)[0]
    assert apart[0] == pytest.approx(flat[0], rel=1e-6) and apart[1] == pytest.approx(flat[1], rel=1e-6)


@pytest.mark.parametrize(("drop", "ep_size"), [(True, 1), (True, 4), (False, 1), (False, 4)])
@ranks(4)
def test_each_tensor_rank_sends_and_computes_its_share_of_the_rows(world_size, drop, ep_size):
    """Of every all-to-all 1 / T; and an all-gather of the other shares, (T - 1) / T of the rows, each way."""
    tokens, itemsize, data, tensor = 8, 4, 2, 2
    options = {"capacity_factor": 1.0, "min_capacity": 1, "drop_policy": "position"} if drop else DROPLESS
    model = Mixed(ep_size, **options)
    config = {"mesh": {"data": data, "tensor": tensor}, "optimizer": "sgd", "zero": {"stage": 1}}
    with initialize(model, config) as engine:
        worked = []
        model.moe.experts.register_forward_pre_hook(lambda _, inputs: worked.append(inputs[0].numel() // WIDTH))
        x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(engine.mesh.data_rank))
        before = {(row.kind, row.group): row.sent_bytes for row in engine.ledger.rows()}
        engine.backward(engine(x))
        sent = {
            (row.kind, row.group): row.sent_bytes - before.get((row.kind, row.group), 0) for row in engine.ledger.rows()
        }
        rows = EXPERTS * (tokens // EXPERTS) if drop else tokens
        total = torch.tensor(sum(worked))
        dist.all_reduce(total)
        assert int(total) == data * rows  # every row is computed once
        assert sent["all_gather", "tensor"] == 2 * (tensor - 1) * rows // tensor * WIDTH * itemsize
        if ep_size == 1:
            assert not any(kind == "all_to_all" for kind, _ in sent)
        elif drop:
            one_way = (ep_size - 1) * rows // tensor * WIDTH * itemsize // ep_size
            assert sent["all_to_all", "experts/4"] == 4 * one_way


@ranks(4)
def test_a_lottery_is_one_for_the_ranks_that_have_the_same_tokens(world_size):
    """Tensor ranks keep the same tokens; data ranks, given the same ones here, draw differently."""
    model = Mixed(1, capacity_factor=0.25, min_capacity=1)
    with initialize(model, {"mesh": {"data": 2, "tensor": 2}, "optimizer": "sgd"}) as engine:
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
        torch.manual_seed(7)
        kept = model.moe(x)[0].detach().abs().sum(1) > 0
        everyone = [torch.empty_like(kept) for _ in range(world_size)]
        dist.all_gather(everyone, kept)
        assert torch.equal(everyone[0], everyone[1]) and torch.equal(everyone[2], everyone[3])
        assert not torch.equal(everyone[0], everyone[2])
        assert engine.mesh.data_rank == dist.get_rank() // 2


@ranks(2)
def test_experts_cut_over_tensor_ranks_are_refused_by_name(world_size):
    model = Mixed(1, enable_expert_tensor_parallelism=True)
    with pytest.raises(ConfigError, match=r"moe: enable_expert_tensor_parallelism=True.*mesh\.tensor=2.*raise ep_size"):
        initialize(model, {"mesh": {"tensor": 2}})
    initialize(model, {"mesh": {"data": 2}}).close()  # without a tensor axis there is nothing to cut over


@ranks(2)
def test_experts_under_cut_norms_are_refused(world_size):
    plan = {"dense.up": "column", "dense.down": "row", "table": "vocabulary"}
    model = Mixed()
    model.table = nn.Embedding(4, WIDTH)
    model.moe.ep_size = 1
    with pytest.raises(ConfigError, match=r"Leave tensor\.cut_norms out"):
        initialize(model, {"mesh": {"tensor": 2}, "tensor": {"plan": plan, "cut_norms": True}})
