"""Sums in rank order, sums of squares, and counts of what is not finite."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from trilithon.kernels import count_non_finite, ordered_sum, sum_of_squares

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMEL = 10_007  # more than two blocks of the compiled loop, with a tail


@pytest.fixture(params=["torch", "numba"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numba":
        pytest.importorskip("numba")
    monkeypatch.setenv("TRILITHON_KERNELS", request.param)
    return str(request.param)


@pytest.mark.parametrize("pieces_dtype,out_dtype", itertools.product(DTYPES, DTYPES))
@pytest.mark.parametrize("accumulate", [False, True])
def test_ordered_sum_adds_in_rank_order_in_fp32_and_rounds_once(
    kernels: str, pieces_dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool
) -> None:
    pieces = torch.randn(3, NUMEL).to(pieces_dtype)
    out = torch.randn(NUMEL).to(out_dtype)
    total = (pieces[0].float() + pieces[1].float() + pieces[2].float()) * 0.3
    expected = (out.float() + total if accumulate else total).to(out_dtype)
    ordered_sum(pieces, out, scale=0.3, accumulate=accumulate)
    assert torch.equal(out, expected)


def test_ordered_sum_takes_rows_from_anywhere_and_may_write_to_one_of_them(kernels: str) -> None:
    pieces = [torch.randn(NUMEL + 3)[3:], torch.randn(NUMEL), torch.randn(NUMEL + 1)[:-1]]
    expected = pieces[0] + pieces[1] + pieces[2]
    ordered_sum(pieces, pieces[1])
    assert torch.equal(pieces[1], expected)


@pytest.mark.parametrize("world_size", [1, 2, 17])
def test_ordered_sum_of_any_number_of_pieces(kernels: str, world_size: int) -> None:
    pieces = torch.randn(world_size, 100)
    expected = pieces[0].clone()
    for piece in pieces[1:]:
        expected += piece
    out = torch.empty(100)
    ordered_sum(pieces, out)
    assert torch.equal(out, expected)


def test_ordered_sum_of_fp64_stays_in_fp64(kernels: str) -> None:
    pieces, out = torch.randn(2, 100, dtype=torch.float64), torch.empty(100, dtype=torch.float64)
    ordered_sum(pieces, out)
    assert torch.equal(out, pieces[0] + pieces[1])


def test_pieces_of_mixed_types_are_still_added_right(kernels: str) -> None:
    pieces, out = [torch.randn(100), torch.randn(100).bfloat16()], torch.empty(100)
    ordered_sum(pieces, out)
    assert torch.equal(out, pieces[0] + pieces[1].float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_squares_is_the_fp64_sum(kernels: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, NUMEL).to(dtype)
    expected = math.fsum(value * value for value in x.double().flatten().tolist())
    assert sum_of_squares(x) == pytest.approx(expected, rel=3 * NUMEL * 2**-53)


@pytest.mark.parametrize("dtype,large", [(torch.float32, 3e38), (torch.bfloat16, 3e38), (torch.float16, 65504.0)])
def test_large_but_finite_gradients_have_a_finite_norm(kernels: str, dtype: torch.dtype, large: float) -> None:
    x = torch.full((NUMEL,), large, dtype=dtype)
    assert sum_of_squares(x) == pytest.approx(NUMEL * float(x[0]) ** 2, rel=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 5000, NUMEL - 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_anywhere_makes_the_sum_not_finite(
    kernels: str, dtype: torch.dtype, place: int, bad: float
) -> None:
    x = torch.randn(NUMEL).to(dtype)
    x[place] = bad
    assert not math.isfinite(sum_of_squares(x))
    assert count_non_finite(x) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_count_non_finite_counts_each_kind(kernels: str, dtype: torch.dtype) -> None:
    x = torch.zeros(NUMEL, dtype=dtype)
    assert count_non_finite(x) == 0
    x[::3] = math.nan
    x[1::3] = -math.inf
    x[2] = torch.finfo(dtype).max
    assert count_non_finite(x) == NUMEL - len(range(2, NUMEL, 3))


def test_nothing_sums_to_nothing(kernels: str) -> None:
    assert sum_of_squares(torch.empty(0)) == 0.0
    assert count_non_finite(torch.empty(0)) == 0
