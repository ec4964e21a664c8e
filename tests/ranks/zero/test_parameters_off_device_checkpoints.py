"""Checkpoints of parameters, gradients and tiles that rest elsewhere are those of the device, and load anywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import trilithon
from trilithon.checkpoint import open_checkpoint
from trilithon.testing import ranks
from trilithon.testing.models import TinyGPT
from trilithon.testing.parity import token_batches

ADAMW = {"kind": "adamw", "lr": 1e-2}


def engine_with(tier: str, folder: Path, tiles: int | None) -> trilithon.Engine:
    config: dict[str, Any] = {
        "batch": {"accumulation": 2},
        "zero": {"stage": 3, "bucket_numel": 1, "tile_above_numel": tiles},
        "optimizer": ADAMW,
        "offload": {"state": tier, "parameters": tier, "path": str(folder / "tiers")},
    }
    return trilithon.initialize(TinyGPT(layers=2, frozen=True), config)


def go_on(engine: trilithon.Engine, batches: Any) -> dict[str, Tensor]:
    """To the end of the batches; everything that training keeps."""
    for batch in batches:
        engine.backward(engine(*(part[engine.rank : engine.rank + 1] for part in batch)))
        engine.step()
    found = dict(engine.full_parameters())
    found |= {f"{name}/exp_avg": value for name, value in engine.view("exp_avg")}
    return found


@ranks(2)
def test_training_goes_on_exactly_wherever_it_rests_and_in_tiles_or_not(world_size: int, tmp_path: Path):
    """Saved in the middle of a window, whose gradients rest on disk as well."""
    batches = [micro for step in token_batches(3, world_size, 2) for micro in step]
    for saved, loaded in ((("disk", None), ("device", None)), (("device", None), ("disk", 1024))):
        engine = engine_with(saved[0], tmp_path, saved[1])
        for batch in batches[:3]:
            engine.backward(engine(*(part[engine.rank : engine.rank + 1] for part in batch)))
            engine.step()
        path = engine.save(tmp_path / "checkpoints")
        scratch = os.listdir(tmp_path / "tiers") if saved[0] == "disk" else []
        expected = go_on(engine, batches[3:])
        engine.close()
        engine = engine_with(loaded[0], tmp_path, loaded[1])
        engine.load(tmp_path / "checkpoints")
        got = go_on(engine, batches[3:])
        engine.close()
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            same = torch.equal if loaded[1] is None else torch.allclose  # tiles add in another order
            assert same(value, got[name]), (saved, loaded, name)
        if torch.distributed.get_rank() == 0:
            text = "".join(file.read_text() for file in Path(path).glob("*.json"))
            assert not any(name in text for name in scratch)  # no path into what is gone after the run


@ranks(2)
def test_a_tiled_model_is_saved_under_the_names_of_the_plain_one(world_size: int, tmp_path: Path):
    engine = engine_with("disk", tmp_path, 1024)
    batch = token_batches(1, world_size)[0][0]
    for _ in range(2):
        engine.backward(engine(*(part[engine.rank : engine.rank + 1] for part in batch)))
    engine.step()
    path = engine.save(tmp_path / "checkpoints")
    whole = engine.state_dict()
    engine.close()
    with open_checkpoint(path.parent, path.name) as reader:
        for part in ("master", "frozen", "param"):
            for entry in reader.entries(part):
                assert "tiles" not in entry.name
                assert tuple(entry.shape) == tuple(whole[entry.name].shape)
                if part != "param":
                    assert torch.equal(reader.read(part, entry.name), whole[entry.name]), entry.name
    torch.distributed.barrier()
    assert not (tmp_path / "tiers").exists()
