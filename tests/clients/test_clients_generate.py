"""from_pretrained and generate under stage 3: parameters are cut as they are made, and whole where they are used."""

from __future__ import annotations

from pathlib import Path

import plain_training
import pytest
import torch
from launching import RankServer
from published import Published


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generate_equals_plain_generation(
    ranks: RankServer, published: Published, tmp_path: Path, name: str, world: int
) -> None:
    source: Path = getattr(published, name)
    done = ranks.run(
        "zero3_generate.py",
        tmp_path,
        *("--model", source, "--text", published.text, "--output_dir", tmp_path),
        world_size=world,
    )
    model = plain_training.load(source).eval()
    prompts = plain_training.tokens_of(published.text, source, 8 * world).view(world, 1, 8)
    for rank in range(world):
        report = done.report(f"report_{rank}.json")
        with torch.no_grad():
            tokens = model.generate(prompts[rank], max_new_tokens=8, do_sample=False, pad_token_id=0)
            logits = model(prompts[rank]).logits[0, -1]
        assert report["tokens"] == tokens[0].tolist()
        assert report["logits"] == pytest.approx(logits.tolist(), rel=1e-4, abs=1e-5)
        if world > 1:  # one rank alone keeps all values
            assert report["partitioned"] == len(list(model.parameters()))
        assert report["parameters"] == sum(p.numel() for p in model.parameters())
