"""Any cut into any other: what was saved in some ranges is read in others, element by element, bit by bit."""

from __future__ import annotations

import random
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from tables import contents, on_thread_ranks, piece, whole

from trilithon.checkpoint import Alone, Wanted, open_checkpoint, save
from trilithon.checkpoint.manifest import check_coverage
from trilithon.errors import CheckpointError


def random_cuts(rng: random.Random, numel: int, count: int) -> list[tuple[int, int]]:
    bounds = sorted([0, numel, *(rng.randint(0, numel) for _ in range(count - 1))])
    return [(a, b) for a, b in pairwise(bounds) if a < b]


@pytest.mark.parametrize("seed", range(6))
def test_ranges_of_any_cut_are_read_back_bit_for_bit(seed, tmp_path, monkeypatch):
    """Blocks of 256 bytes, so that ranges cross many of them; files of 600, so that tensors cross files."""
    monkeypatch.setattr("trilithon.checkpoint.digest.BLOCK_BYTES", 256)
    monkeypatch.setattr(import_module("trilithon.checkpoint.save"), "BLOCK_BYTES", 256)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8)
    shapes = [(), (1,), (0, 3), (7,), (3, 5), (rng.randint(1, 40), rng.randint(1, 40)), (2, 3, rng.randint(1, 30))]
    tensors = {
        f"t{i}": torch.randint(0, 2 if dtypes[i % 6] is torch.bool else 100, shape, generator=generator).to(
            dtypes[i % 6]
        )
        for i, shape in enumerate(shapes)
    }
    world = rng.randint(1, 4)
    shares: list[list] = [[] for _ in range(world)]
    for name, tensor in tensors.items():
        for a, b in random_cuts(rng, tensor.numel(), rng.randint(1, 5)):
            shares[rng.randrange(world)].append(piece("master", name, tensor, a, b))
        if tensor.numel() == 0:
            shares[0].append(whole("master", name, tensor))

    def body(rank):
        return save(tmp_path, "t", contents(shares[rank.rank]), rank, file_bytes=600)

    paths = on_thread_ranks(world, body)
    assert set(paths) == {tmp_path / "t"}
    with open_checkpoint(tmp_path) as reader:
        check_coverage(reader.manifest.entries)
        for name, tensor in tensors.items():
            assert torch.equal(reader.read("master", name), tensor)
            flat = tensor.reshape(-1)
            for a, b in random_cuts(rng, tensor.numel(), 4):
                assert torch.equal(reader.read("master", name, a, b - a), flat[a:b])
        wanted, expected = [], []
        for name, tensor in tensors.items():
            for a, b in random_cuts(rng, tensor.numel(), 3):
                wanted.append(Wanted(reader.entry("master", name), a, torch.empty(b - a, dtype=tensor.dtype)))
                expected.append(tensor.reshape(-1)[a:b])
        reader.fill(wanted)
        assert all(torch.equal(one.into, values) for one, values in zip(wanted, expected, strict=True))
        assert any(len(record.blocks) > 1 for record in reader.manifest.files.values())


def test_values_are_rounded_into_the_type_that_asks(tmp_path):
    values = torch.randn(100)
    save(tmp_path, "t", contents([whole("master", "w", values)]), Alone())
    with open_checkpoint(tmp_path) as reader:
        into = torch.empty(40, dtype=torch.bfloat16)
        reader.fill([Wanted(reader.entry("master", "w"), 30, into)])
    assert torch.equal(into, values[30:70].bfloat16())


def test_what_no_rank_holds_or_two_cut_differently_is_refused(tmp_path):
    tensor = torch.arange(10.0)
    for cuts, what in (([(0, 4), (6, 10)], "elements 4 to 5 are held by no rank"), ([(0, 6), (4, 10)], "two ranks")):
        with pytest.raises(CheckpointError, match=what):
            save(tmp_path, "t", contents([piece("master", "w", tensor, a, b) for a, b in cuts]), Alone())
    with pytest.raises(CheckpointError, match="from 8 on are held by no rank"):
        save(tmp_path, "t", contents([piece("master", "w", tensor, 0, 8)]), Alone())
    assert [path.name for path in tmp_path.iterdir()] == []


def test_ranks_with_different_models_are_told_apart(tmp_path):
    def body(rank):
        return save(tmp_path, "t", contents([whole("master", "w", torch.zeros(3 + rank.rank))]), rank)

    errors = on_thread_ranks(2, body)
    assert all(isinstance(error, CheckpointError) and "rank 1" in str(error) for error in errors)
