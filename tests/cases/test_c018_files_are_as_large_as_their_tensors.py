"""50 layers at stages 1 and 2: what is written is the tensors' bytes, not the flat buffers that they are views of."""

import io

import torch
from torch import nn

import trilithon


def test_checkpoints_and_state_dicts_hold_no_more_than_the_tensors(tmp_path):
    for stage in (1, 2):
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(50)))
        weights = sum(p.numel() * 4 for p in model.parameters())
        with trilithon.initialize(model, {"zero": {"stage": stage}, "optimizer": "adamw"}) as engine:
            path = engine.save(tmp_path, f"stage-{stage}")
            payload = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            assert 3 * weights <= payload <= 1.05 * 3 * weights  # weights and two moments
            written = io.BytesIO()
            torch.save(engine.state_dict(), written)  # documented in place of module.state_dict(), whose views drag
            assert len(written.getvalue()) <= 1.05 * weights
