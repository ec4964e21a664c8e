"""Cutting a parameter and putting it together again, whatever it holds."""

from __future__ import annotations

import pytest
import torch

from trilithon.errors import ConfigError
from trilithon.parallel import ParameterSlice


def slices(shape, degree, **options):
    return [ParameterSlice.of("w", shape, degree=degree, index=index, **options) for index in range(degree)]


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((8, 6), {"dim": 0}),
        ((6, 8), {"dim": 1}),
        ((16,), {"dim": 0}),
        ((24, 5), {"dim": 0, "blocks": (8, 8, 8)}),
        ((5, 24), {"dim": 1, "blocks": (16, 4, 4)}),
        ((5, 3), {"dim": 0, "pad": True}),
        ((61, 3), {"dim": 0, "pad": True}),
    ],
)
def test_parts_of_equal_shape_make_the_whole_again(shape, options, degree):
    whole = torch.randn(shape)
    cuts = slices(shape, degree, **options)
    parts = [cut.cut(whole) for cut in cuts]
    assert {tuple(part.shape) for part in parts} == {cuts[0].local_shape}
    assert torch.equal(cuts[0].assemble(parts), whole)
    held = sum(stop - start for cut in cuts for start, stop in cut.ranges())
    assert held == shape[options["dim"]]


def test_each_rank_gets_its_heads_of_all_three_fused_matrices():
    rows = torch.arange(12)[:, None].float()  # query rows 0-3, key rows 4-7, value rows 8-11
    first, second = slices((12, 1), 2, dim=0, blocks=(4, 4, 4))
    assert first.cut(rows).flatten().tolist() == [0, 1, 4, 5, 8, 9]
    assert second.cut(rows).flatten().tolist() == [2, 3, 6, 7, 10, 11]


def test_padding_is_zero_and_belongs_to_nobody():
    parts = [cut.cut(torch.ones(5, 2)) for cut in slices((5, 2), 4, dim=0, pad=True)]
    assert [part.sum().item() for part in parts] == [4.0, 4.0, 2.0, 0.0]


def test_what_does_not_divide_is_refused_with_names_and_sizes():
    with pytest.raises(ConfigError, match=r"'w' of shape \(6, 4\) does not split over 4 .* 6 along dim 0"):
        slices((6, 4), 4, dim=0)
    with pytest.raises(ConfigError, match=r"blocks \(2, 2\) do not add up to 6"):
        slices((6, 4), 2, dim=0, blocks=(2, 2))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((8, 6), {"dim": 0}),
        ((6, 8), {"dim": 1}),
        ((12, 5), {"dim": 0, "blocks": (4, 4, 4)}),
        ((5, 3), {"dim": 0, "pad": True}),
    ],
)
def test_runs_lead_each_element_to_its_place_in_the_whole(shape, options):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for cut in slices(shape, 2, **options):
        here = cut.cut(whole).flatten()
        for start, numel in ((0, len(here)), (3, 5), (len(here) - 2, 2), (5, 0)):
            found = list(cut.runs(start, numel))
            for mine, there, length in found:
                assert torch.equal(here[mine : mine + length], whole.flatten()[there : there + length])
                assert start <= mine and mine + length <= start + numel
            padding = sum(1 for i in range(start, start + numel) if i >= cut.cut(torch.ones(shape)).sum())
            assert sum(length for *_, length in found) == numel - padding
