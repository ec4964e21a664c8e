"""16-bit numbers in compiled loops: every pattern is read, and every interesting value written, as torch does it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trilithon.kernels import ordered_sum

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRILITHON_KERNELS", "numba")


def converted(values: Tensor, to: torch.dtype) -> Tensor:
    """`values` through one compiled load and one compiled store: the sum of a single piece."""
    out = torch.empty(values.numel(), dtype=to)
    ordered_sum([values], out)
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65536 of a 16-bit type, subnormal numbers, infinities and NaNs included."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_read_exactly(dtype: torch.dtype) -> None:
    values = every_pattern(dtype)
    assert same(converted(values, torch.float32), values.float())
    assert same(converted(values, dtype), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even_around_every_16_bit_number_and_every_tie(dtype: torch.dtype) -> None:
    values = every_pattern(dtype).float()
    up = torch.nextafter(every_pattern(dtype).float(), torch.tensor(torch.inf))
    finite = values[values.isfinite()].sort().values
    ties = (finite[1:].double() + finite[:-1].double()).div(2).float()  # exact: one more bit than the 16-bit type
    largest = finite.max().double()
    spacing = largest - finite[finite < largest].max().double()
    overflow_tie = (largest + spacing / 2).float().reshape(1)  # from here on, values round to infinity
    centres = torch.cat([values, up, ties, overflow_tie, -overflow_tie])
    interesting = torch.cat(
        [centres, *(torch.nextafter(centres, torch.tensor(to)) for to in (torch.inf, -torch.inf, 0.0))]
    )
    assert same(converted(interesting, dtype), interesting.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_bit_patterns_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    values = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert values.isnan().any() and (values.abs() < 1e-38).any()
    assert same(converted(values, dtype), values.to(dtype))
