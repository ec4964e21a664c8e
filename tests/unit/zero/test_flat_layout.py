"""The flat layout: every element has one place and one owner, aligned, for any shapes and number of ranks."""

from __future__ import annotations

import random

import pytest

from trilithon.zero.layout import ALIGNMENT, FlatLayout


def random_layout(seed: int) -> FlatLayout:
    draw = random.Random(seed)
    shapes = [
        tuple(draw.choice([0, 1, 2, 3, 7, 64, 65, 100]) for _ in range(draw.randint(0, 2)))
        for _ in range(draw.randint(1, 9))
    ]
    entries = [(f"p{index}", shape, draw.randint(0, 2)) for index, shape in enumerate(shapes)]
    return FlatLayout.of(entries, draw.randint(1, 5))


@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_the_shards_cover_every_parameter_once_in_order(seed):
    layout = random_layout(seed)
    seen: dict[str, list[tuple[int, int]]] = {field.name: [] for field in layout.fields}
    for rank in range(layout.world_size):
        low, high = layout.owned(rank)
        assert high - low == layout.shard_numel and low % ALIGNMENT == 0
        for piece in layout.pieces(low, high):
            assert piece.numel > 0 and low + piece.offset == piece.field.start + piece.start
            seen[piece.field.name].append((piece.start, piece.start + piece.numel))
    for field in layout.fields:
        bounds = [0, *(stop for _, stop in seen[field.name])]
        assert [start for start, _ in seen[field.name]] == bounds[:-1]
        assert bounds[-1] == field.numel


@pytest.mark.parametrize("seed", range(40))
def test_gaps_and_fields_fill_the_buffer_without_overlap(seed):
    layout = random_layout(seed)
    spans = sorted([(f.start, f.stop) for f in layout.fields if f.numel] + list(layout.gaps()))
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans)][: len(spans)]
    assert (spans[-1][1] if spans else 0) == layout.padded
    assert all(field.start % ALIGNMENT == 0 for field in layout.fields)
    assert layout.padded % (ALIGNMENT * layout.world_size) == 0
    assert layout.numel == sum(field.numel for field in layout.fields)


@pytest.mark.parametrize("seed", range(40))
def test_group_ranges_split_a_shard_where_groups_change(seed):
    layout = random_layout(seed)
    for rank in range(layout.world_size):
        low, high = layout.owned(rank)
        ranges = list(layout.group_ranges(low, high))
        assert [start for _, start, _ in ranges] == [low, *(stop for _, _, stop in ranges)][: len(ranges)]
        for group, start, stop in ranges:
            assert {piece.field.group for piece in layout.pieces(start, stop)} <= {group}


def test_parameters_without_elements_take_no_room():
    layout = FlatLayout.of([("none", (0,), 0), ("scalar", (), 0), ("empty", (3, 0), 0)], 2)
    assert (layout.numel, layout.padded) == (1, 2 * ALIGNMENT)
    assert list(FlatLayout.of([("none", (0,), 0)], 3).pieces(0, 0)) == []
