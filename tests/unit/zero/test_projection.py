"""The norm of a mean from projections of its parts."""

from __future__ import annotations

import math

import pytest
import torch

from trilithon.zero.projection import LENGTH, projection


@pytest.mark.parametrize("numel", [1, 255, 256, 1000, 257 * 2048 + 3])
def test_is_linear_for_any_length_and_the_same_for_the_same_key_and_step(numel: int) -> None:
    first, second = torch.randn(2, numel, generator=torch.Generator().manual_seed(1)).unbind()
    apart = projection(first, "unit", 3) + projection(second, "unit", 3)
    torch.testing.assert_close(projection(first + second, "unit", 3), apart, rtol=1e-4, atol=1e-4 * math.sqrt(numel))
    assert torch.equal(projection(first, "unit", 3), projection(first.clone(), "unit", 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_are_those_of_the_vector_on_average(dtype: torch.dtype) -> None:
    """Over steps the mean of the estimates comes to the true square: 9 % each, so 1 % over 100, and 4 of these here."""
    flat = torch.randn(3000, generator=torch.Generator().manual_seed(2)).mul_(torch.linspace(0, 3, 3000)).to(dtype)
    exact = float(flat.double().square().sum())
    found = [float(projection(flat, "unit", step).square().sum()) / exact for step in range(100)]
    single = math.sqrt(2 / LENGTH)
    assert abs(sum(found) / len(found) - 1) < 4 * single / math.sqrt(len(found))
    assert all(abs(one - 1) < 5 * single for one in found)
    assert len(set(found)) == len(found), "every step has signs of its own"


def test_what_repeats_itself_is_as_well_estimated() -> None:
    """A constant vector of three chunks: no two elements share their sign for good, within a chunk or between them."""
    flat = torch.ones(3 * LENGTH * 2048)
    found = [float(projection(flat, "unit", step).square().sum()) / flat.numel() for step in range(40)]
    assert all(abs(one - 1) < 6 * math.sqrt(2 / LENGTH) for one in found)
