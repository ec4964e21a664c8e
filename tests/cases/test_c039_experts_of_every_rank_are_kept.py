"""C039: when each rank holds experts of its own, all are in the checkpoint, once, under names that no rank is part of.

Experts that are spread over ranks are tensors that only one rank has. They are saved and read as such here, at the
level of the checkpoint's tables; layers of experts come later.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from trilithon.checkpoint import Contents, Holding, Span, export, open_checkpoint, save, verify
from trilithon.testing import run_ranks

EXPERTS = 4
ABOUT = {"world_size": 2, "zero_stage": 1, "precision": "fp32", "config": {}, "library": "0"}


class Gloo:
    rank = property(lambda self: dist.get_rank())
    world_size = property(lambda self: dist.get_world_size())

    def exchange(self, value, what):
        answers = [None] * dist.get_world_size()
        dist.all_gather_object(answers, value)
        return answers


def holding(part, name, tensor, *, replicated):
    @contextmanager
    def open_():
        yield {part: tensor.reshape(-1)}

    span = Span(part, name, tensor.dtype, tuple(tensor.shape), 0, tensor.numel(), 0)
    return Holding(name, (span,), open_, replicated)


def save_experts(folder):
    share = EXPERTS // dist.get_world_size()
    mine = range(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    holdings = [
        holding(part, f"moe.experts.{index}.weight", torch.full((3, 2), index + start), replicated=False)
        for index in mine
        for part, start in (("master", 1.0), ("exp_avg", 10.0))
    ]
    holdings.append(holding("master", "moe.gate.weight", torch.arange(8.0), replicated=True))
    save(folder, "one", Contents(1, holdings, about=ABOUT), Gloo())


@pytest.mark.parametrize("degree", [1, 2])
def test_every_expert_is_there_once_and_goes_to_its_owner_at_any_degree(tmp_path, degree):
    run_ranks(save_experts, 2, str(tmp_path / "run"))
    assert verify(tmp_path / "run") == []
    with open_checkpoint(tmp_path / "run") as saved:
        names = [entry.name for entry in saved.entries("master")]
        assert sorted(names) == [f"moe.experts.{index}.weight" for index in range(EXPERTS)] + ["moe.gate.weight"]
        for rank in range(degree):  # what a rank of this degree would read
            for index in range(rank * EXPERTS // degree, (rank + 1) * EXPERTS // degree):
                for part, start in (("master", 1.0), ("exp_avg", 10.0)):
                    expected = torch.full((3, 2), index + start)
                    assert torch.equal(saved.read(part, f"moe.experts.{index}.weight"), expected)
    export(tmp_path / "run", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert [float(weights[f"moe.experts.{index}.weight"][0, 0]) for index in range(EXPERTS)] == [1.0, 2.0, 3.0, 4.0]
