"""Eight ranks over data, sequence and tensor slices, with each ZeRO stage, train like plain PyTorch in one process."""

from __future__ import annotations

import pytest
from mesh_runs import Case
from test_mesh_parity import check

MESHES = [
    ((("data", 2), ("sequence", 2), ("tensor", 2)), True),
    ((("data", 4), ("tensor", 2)), False),
    ((("data", 2), ("sequence", 4)), False),
]


@pytest.mark.parametrize("stages", [(0, 3), (1, 2)])
def test_every_stage_on_meshes_of_eight_trains_like_one_process(stages):
    check([Case("gpt", axes, stage, cut_norms) for axes, cut_norms in MESHES for stage in stages], 8)
