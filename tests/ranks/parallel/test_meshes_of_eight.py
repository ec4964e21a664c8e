"""Eight ranks over data, sequence and tensor slices, with each ZeRO stage, train like plain PyTorch in one process."""

from __future__ import annotations

from mesh_runs import Case
from test_mesh_parity import check

ALL_AXES = (("data", 2), ("sequence", 2), ("tensor", 2))


def test_meshes_of_eight_train_like_one_process():
    cases = [
        Case("gpt", ALL_AXES, 0),
        Case("gpt", ALL_AXES, 3, cut_norms=True),
        Case("gpt", (("data", 4), ("tensor", 2)), 2),
        Case("gpt", (("data", 2), ("sequence", 4)), 1),
    ]
    check(cases, 8)
