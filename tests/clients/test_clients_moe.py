"""A script with deepspeed.moe: experts on one rank and over two, one and two experts a token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import ds_files
import plain_training
import pytest
import torch
from definitions import definitions_of
from launching import RankServer
from published import Published
from torch import Tensor, nn

STEPS, EXPERTS, WIDTH = 4, 4, 32


class PlainMixture(nn.Module):
    """Gate and experts without a capacity that binds: every token meets its `k` best experts.

    The experts start as copies of the one that is given, before the gate is made, and the balance loss counts first
    choices: experts * sum(mean score * share of tokens).
    """

    def __init__(self, hidden_size: int, expert: nn.Module, num_experts: int, k: int, **_: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_experts))
        self.k = k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = x.flatten(0, -2)
        scores = torch.softmax(self.gate(tokens.float()), dim=-1)
        best, chosen = scores.topk(self.k, dim=-1)
        weights = best / best.sum(-1, keepdim=True) if self.k > 1 else best
        outputs = torch.stack([expert(tokens) for expert in self.experts], dim=1)
        mixed = (outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, tokens.shape[1])) * weights.unsqueeze(-1)).sum(1)
        share = nn.functional.one_hot(chosen[:, 0], len(self.experts)).float().mean(0)
        return mixed.view_as(x), len(self.experts) * (scores.mean(0) * share).sum(), share


def reference(published: Published, parts: int, k: int) -> tuple[list[float], list[float]]:
    names = definitions_of("moe_train.py", MoE=PlainMixture)
    torch.manual_seed(0)
    model = names["SparseModel"](plain_training.load(published.llama).config.vocab_size, WIDTH, EXPERTS, 1, k)
    updates = plain_training.updates_of(published.text, published.llama, STEPS, parts)
    losses: list[float] = []
    balances: list[float] = []

    def loss_of(call: nn.Module, ids: Tensor) -> Tensor:
        loss, balance, _ = call(ids)
        losses.append(loss.item())
        balances.append(balance.item())
        total: Tensor = loss + 0.01 * balance
        return total

    plain_training.train(
        model,
        updates,
        rates=plain_training.constant(0.05),
        loss_of=loss_of,
        make=lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01),
    )
    return _means(losses, parts), _means(balances, parts)


def _means(values: list[float], parts: int) -> list[float]:
    return [sum(values[i : i + parts]) / parts for i in range(0, len(values), parts)]


@pytest.mark.parametrize(
    ("zero", "world", "expert_parallel", "k"), [(0, 1, 1, 1), (1, 2, 1, 2), (2, 2, 2, 1), (2, 2, 2, 2)]
)
def test_experts_equal_plain_ones(
    ranks: RankServer, published: Published, tmp_path: Path, *, zero: int, world: int, expert_parallel: int, k: int
) -> None:
    config = ds_files.for_a_loop(zero, world, 2)
    done = ranks.run(
        "moe_train.py",
        tmp_path,
        *("--tokenizer", published.llama, "--text", published.text, "--output_dir", tmp_path),
        *("--experts", EXPERTS, "--ep_size", expert_parallel, "--k", k),
        *("--deepspeed", "--deepspeed_config", ds_files.write(tmp_path, config)),
        world_size=world,
    ).report()
    losses, balances = reference(published, 2 * world, k)
    assert done["found"] == [True, EXPERTS]
    assert done["losses"] == pytest.approx(losses, rel=1e-4)
    assert done["balances"] == pytest.approx(balances, rel=1e-3)
