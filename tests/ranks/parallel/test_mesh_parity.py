"""Every mesh x ZeRO stage trains like plain PyTorch in one process: dropout on, embeddings tied, gradients clipped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mesh_runs import Case, plain, run_all

from trilithon.testing import run_ranks
from trilithon.testing.parity import assert_same_training, tolerance

APART = 1e-5  # fp32: an element may end this far from the reference after five steps
MESHES = [
    ((("tensor", 2),), False),
    ((("tensor", 2),), True),
    ((("sequence", 2),), False),
    ((("data", 2), ("tensor", 2)), False),
    ((("data", 2), ("tensor", 2)), True),
    ((("data", 2), ("sequence", 2)), False),
    ((("sequence", 2), ("tensor", 2)), False),
    ((("sequence", 2), ("tensor", 2)), True),
    ((("tensor", 4),), False),
    ((("tensor", 4),), True),
    ((("sequence", 4),), False),
]


def name_of(mesh):
    axes, cut_norms = mesh
    return "-".join(f"{axis}{size}" for axis, size in axes) + ("-norms" if cut_norms else "")


def check(cases: list[Case], world_size: int) -> None:
    by_rank = run_ranks(run_all, world_size, cases, timeout_s=240)
    for place, case in enumerate(cases):
        reference = plain(case.kind, case.accumulation)
        runs = [runs[place] for runs in by_rank]
        # A key's bias has no gradient in exact arithmetic: how far it moves is rounding noise, held by APART alone.
        moved = {name: value for name, value in reference.parameters.items() if not name.endswith("key.bias")}
        for run in runs:
            held = {name: run.parameters[name] for name in moved}
            assert_same_training(
                replace(reference, parameters=moved), run.losses, held, tolerance("fp32", 5), run.grad_norms
            )
            assert run.parameters.keys() == reference.parameters.keys()
            for parameter, expected in reference.parameters.items():
                apart = (run.parameters[parameter] - expected).abs().max().item()
                assert apart <= APART, f"{case}: an element of {parameter} ends {apart:.1e} from the reference"
            assert all(factor < 1 for factor in run.clip_factors), f"{case}: nothing was clipped"
            assert run.losses == runs[0].losses and run.grad_norms == runs[0].grad_norms
            for parameter, value in runs[0].parameters.items():
                assert torch.equal(run.parameters[parameter], value), f"{case}: ranks hold different {parameter}"


@pytest.mark.parametrize("mesh", MESHES, ids=map(name_of, MESHES))
def test_every_stage_on_every_mesh_trains_like_one_process(mesh):
    axes, cut_norms = mesh
    world_size = torch.tensor([size for _, size in axes]).prod().item()
    check([Case("gpt", axes, stage, cut_norms) for stage in range(4)], world_size)


@pytest.mark.parametrize("kind", ["llama", "bert", "lamb"])
def test_other_shapes_and_norms_per_parameter_train_alike(kind):
    """LAMB needs the norm of each whole parameter, cut over tensor ranks and by ZeRO."""
    meshes = [((("data", 2), ("tensor", 2)), True), ((("sequence", 2), ("tensor", 2)), False)]
    check([Case(kind, axes, stage, cut) for axes, cut in meshes for stage in (0, 3)], 4)


def test_micro_batches_add_up_on_a_mesh():
    axes = (("data", 2), ("tensor", 2))
    check([Case("gpt", axes, stage, True, accumulation=2) for stage in (1, 2, 3)], 4)
