"""C008 (hpcaitech/ColossalAI#2496): with parameters offloaded and accumulation, outputs were zero after one step."""

from pathlib import Path

import torch

import trilithon
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import rank_part, vector_batches


@ranks(2)
def test_outputs_are_those_of_the_run_without_offload(world_size: int, tmp_path: Path):
    batches, outputs = vector_batches(3, 2, 2), {}
    for tier in ("device", "host", "disk"):
        config = {
            "batch": {"accumulation": 2},
            "zero": {"stage": 3, "bucket_numel": 1},
            "optimizer": {"kind": "adamw", "lr": 1e-2},
            "offload": {"parameters": tier, "path": str(tmp_path)},
        }
        with trilithon.initialize(MLP(), config) as engine:
            outputs[tier] = []
            for micro_batches in batches:
                engine.train_step([rank_part(batch, engine.rank, world_size) for batch in micro_batches])
                outputs[tier].append(engine.eval_step((torch.ones(1, 16),)))
    for before, *rest in zip(*outputs.values(), strict=True):
        assert before.abs().sum() > 0
        assert all(torch.equal(before, output) for output in rest)
