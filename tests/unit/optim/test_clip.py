"""The agreed norm, the clip factor against torch, and the name of the parameter that broke."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trilithon.contracts import Shard, Slice
from trilithon.optim.clip import agreed_norm, clip_factor, first_non_finite, squared_norm


def slice_of(grad: Tensor, cuts: dict[str, tuple[int, int]] | None = None) -> Slice:
    shards = [
        Shard(name, 0, stop - start, start, torch.Size([stop - start])) for name, (start, stop) in (cuts or {}).items()
    ]
    return Slice("unit.0", 0, torch.zeros(grad.numel()), grad, None, shards)


@pytest.mark.parametrize("size", [1e-6, 0.05, 0.1, 3.0, 1e8])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 7.3])
def test_norm_and_factor_equal_clip_grad_norm_in_fp32(size: float, max_norm: float) -> None:
    grad = size * torch.randn(1000)
    parameter = torch.nn.Parameter(torch.zeros(1000))
    parameter.grad = grad.clone()
    norm = agreed_norm(squared_norm([slice_of(grad)]))
    theirs = torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    assert norm == pytest.approx(float(theirs), rel=1e-6)  # torch adds 1000 squares in fp32
    torch.testing.assert_close(grad * clip_factor(norm, max_norm), parameter.grad, rtol=1e-6, atol=0)


def test_the_factor_is_torchs_bit_for_bit_given_the_same_norm() -> None:
    for norm in torch.rand(1000).mul(3).tolist():
        expected = torch.clamp(0.7 / (torch.tensor(norm) + 1e-6), max=1.0)
        assert clip_factor(norm, 0.7) == float(expected)


def test_a_norm_of_zero_and_clipping_off_leave_gradients_alone() -> None:
    assert agreed_norm(squared_norm([slice_of(torch.zeros(5))])) == 0.0
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(1e9, 0.0) == 1.0


def test_a_clipped_step_of_sgd_has_the_maximal_norm() -> None:
    grad = torch.full((100,), 1.0)  # norm 10
    factor = clip_factor(agreed_norm(squared_norm([slice_of(grad)])), 0.1)
    assert (grad * factor).norm().item() == pytest.approx(0.1, rel=1e-6)


def test_the_norm_does_not_depend_on_cuts_or_on_the_loss_scale() -> None:
    grad = torch.randn(10_000)
    whole = agreed_norm(squared_norm([slice_of(grad)]))
    for cuts in ([1, 5000], [64, 64, 8000], [9999]):
        pieces = torch.tensor_split(grad, cuts)
        total = sum((squared_norm([slice_of(piece)]) for piece in pieces), torch.zeros(1, dtype=torch.float64))
        assert agreed_norm(total) == whole
    assert agreed_norm(squared_norm([slice_of(grad * 1024)]), 1024.0) == whole


def test_no_slices_here_counts_as_zero() -> None:
    total = squared_norm([])
    assert total.shape == (1,) and total.dtype == torch.float64 and float(total) == 0.0


def test_finite_fp16_and_fp32_gradients_never_look_infinite_but_bad_ones_do() -> None:
    assert math.isfinite(float(squared_norm([slice_of(torch.full((1000,), 65504.0, dtype=torch.float16))])))
    assert math.isfinite(float(squared_norm([slice_of(torch.full((1000,), 3e38))])))
    for bad in (math.nan, math.inf):
        grad = torch.ones(10)
        grad[7] = bad
        assert not math.isfinite(float(squared_norm([slice_of(torch.ones(3)), slice_of(grad)])))
    assert math.isnan(clip_factor(math.nan, 1.0))
    assert clip_factor(math.inf, 1.0) == 0.0


def test_the_first_broken_parameter_is_named() -> None:
    grad = torch.zeros(10)
    slice_ = slice_of(grad, {"a": (0, 4), "b": (4, 9), "c": (9, 10)})
    assert first_non_finite([slice_]) is None
    grad[9] = math.nan
    grad[8] = -math.inf
    assert first_non_finite([slice_]) == "b"
