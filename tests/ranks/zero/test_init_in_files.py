"""`zero.init(path=...)`: slices wait in files, for models whose slices do not fit into memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

import trilithon
from trilithon.errors import TierError
from trilithon.testing import ranks
from trilithon.testing.models import MLP, TinyGPT
from trilithon.tiers import SliceFile


@ranks(1, 2)
def test_slices_may_be_kept_in_files_until_they_are_taken_over(world_size: int, tmp_path: Path):
    expected = {name: param.detach() for name, param in TinyGPT().named_parameters()}
    with trilithon.zero.init(open_numel=0, path=tmp_path):
        model = TinyGPT()
        model.positions.weight.data.mul_(2.0)  # opened again, and cut again
    expected["positions.weight"] = expected["positions.weight"] * 2.0
    assert {type(param).__name__ for param in model.parameters()} == {"ShardedParameter"}
    assert list(tmp_path.iterdir())
    with trilithon.zero.gathered(model.norm.weight, modify=0):
        model.norm.weight.data.add_(1.0)
    expected["norm.weight"] = expected["norm.weight"] + 1.0
    config = {"zero": {"stage": 3}, "offload": {"parameters": "host"}, "optimizer": {"kind": "adamw"}}
    with trilithon.initialize(model, config) as engine:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        assert not list(tmp_path.iterdir())
        got = dict(engine.full_parameters())
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@ranks(2)
def test_a_model_that_is_given_up_takes_its_files_along(world_size: int, tmp_path: Path):
    with trilithon.zero.init(open_numel=0, path=tmp_path):
        model = MLP()
    assert list(tmp_path.iterdir())
    del model
    torch.distributed.barrier()
    assert not list(tmp_path.iterdir())


def test_tensors_of_any_size_come_back_and_a_failure_names_the_file(tmp_path, monkeypatch):
    kept = SliceFile(tmp_path)
    values = {key: torch.randn(size) for key, size in enumerate((1, 0, 4097, 100_000))}
    for key, value in values.items():
        kept[key] = value
    kept[2] = values[2] * 2  # in its own place
    size = os.path.getsize(next(tmp_path.glob("*/slices")))
    assert size == 4 * (1 + 4097 + 100_000)
    assert torch.equal(kept.pop(2), values[2] * 2)
    assert all(torch.equal(kept[key], values[key]) for key in (0, 1, 3)) and len(kept) == 3

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(TierError, match=r"could not be written to .*slices: No space left on device"):
        kept[9] = torch.ones(3)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(TierError, match="is shorter than what was written to it"):
        kept[3]
    kept.close()
    assert not list(tmp_path.iterdir())
