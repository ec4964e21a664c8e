"""The formulas against torch.optim over 20 steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trilithon.optim import formulas

NUMEL, STEPS, LR = 4099, 20, 1e-2
ULP = 2.0**-24  # half a unit in the last place of 1.0, the error of one rounding

# Each element: at every step p (below 8 here) is rounded in either implementation, and the step (about LR, times what
# the rule lets it grow to) differs by a few roundings of the state that enters it. Adam's and Adagrad's steps are
# bounded by a small multiple of LR; SGD's grows with momentum by 1 / (1 - 0.9).
TOLERANCE = STEPS * (8 * 2 * ULP + 16 * ULP * 10 * LR * 8)

State = dict[str, Tensor]
Formula = Callable[[Tensor, Tensor, State, int, float], None]


def adam_(p: Tensor, g: Tensor, s: State, step: int, scale: float, **kw: float) -> None:
    formulas.adam_(p, g, s["exp_avg"], s["exp_avg_sq"], lr=LR, step=step, grad_scale=scale, **kw)


def adamw_(p: Tensor, g: Tensor, s: State, step: int, scale: float, **kw: float) -> None:
    formulas.adamw_(p, g, s["exp_avg"], s["exp_avg_sq"], lr=LR, step=step, grad_scale=scale, **kw)


def sgd_(p: Tensor, g: Tensor, s: State, step: int, scale: float, **kw: float) -> None:
    formulas.sgd_(p, g, s.get("momentum_buffer"), lr=LR, first=step == 1, grad_scale=scale, **kw)


def adagrad_(p: Tensor, g: Tensor, s: State, step: int, scale: float, **kw: float) -> None:
    formulas.adagrad_(p, g, s["sum"], lr=LR, step=step, grad_scale=scale, **kw)


CASES = [
    (adam_, ("exp_avg", "exp_avg_sq"), torch.optim.Adam, {}),
    (adam_, ("exp_avg", "exp_avg_sq"), torch.optim.Adam, {"weight_decay": 0.1}),
    (adamw_, ("exp_avg", "exp_avg_sq"), torch.optim.AdamW, {"weight_decay": 0.1}),
    (adamw_, ("exp_avg", "exp_avg_sq"), torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.5, 0.7), "eps": 1e-3}),
    (sgd_, (), torch.optim.SGD, {}),
    (sgd_, (), torch.optim.SGD, {"weight_decay": 0.1}),
    (sgd_, ("momentum_buffer",), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (sgd_, ("momentum_buffer",), torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    (sgd_, ("momentum_buffer",), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (adagrad_, ("sum",), torch.optim.Adagrad, {}),
    (adagrad_, ("sum",), torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("formula,fields,theirs,settings", CASES)
def test_twenty_steps_equal_torch_optim(
    formula: Formula, fields: tuple[str, ...], theirs: type, settings: dict[str, float], dtype: torch.dtype
) -> None:
    scale = 0.25  # a power of two: the reference scales without rounding
    start = torch.randn(NUMEL)
    p, state = start.clone(), {name: torch.zeros(NUMEL) for name in fields}
    reference = torch.nn.Parameter(start.clone())
    optimizer = theirs([reference], lr=LR, foreach=False, **settings)
    for step in range(1, STEPS + 1):
        g = torch.randn(NUMEL).to(dtype)
        formula(p, g, state, step, scale, **settings)
        reference.grad = g.float() * scale
        optimizer.step()
    assert not torch.equal(p, start)
    torch.testing.assert_close(p, reference.detach(), rtol=0, atol=TOLERANCE)
    for name in fields:
        torch.testing.assert_close(state[name], optimizer.state[reference][name], rtol=1e-5, atol=1e-6)


def test_adam_without_bias_correction_takes_the_raw_moments() -> None:
    p, g = torch.zeros(3), torch.tensor([1.0, -2.0, 0.0])
    formulas.adam_(
        p, g, torch.zeros(3), torch.zeros(3), lr=1.0, betas=(0.9, 0.99), eps=0.0, step=1, bias_correction=False
    )
    torch.testing.assert_close(p[:2], torch.tensor([-1.0, 1.0]))  # 0.1 g / (0.1 |g|)
    assert p[2].isnan()  # 0 / (0 + eps) with eps 0


def test_lion_moves_by_the_sign_of_the_interpolated_moment() -> None:
    p, m = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, -1.0])
    g = torch.tensor([2.0, -8.0, 1.0])
    formulas.lion_(p, g, m, lr=0.1, betas=(0.5, 0.99), weight_decay=0.5)
    # u = 0.5 m + 0.5 g = [1, -3.5, 0]; p = p (1 - 0.05) - 0.1 sign(u); m = 0.99 m + 0.01 g
    torch.testing.assert_close(p, torch.tensor([0.85, 1.05, 0.95]))
    torch.testing.assert_close(m, torch.tensor([0.02, 0.91, -0.98]))


def test_lion_equals_its_definition_over_twenty_steps() -> None:
    p, m = torch.randn(NUMEL), torch.zeros(NUMEL)
    expected, moment = p.double(), m.double()
    for _ in range(STEPS):
        g = torch.randn(NUMEL)
        direction = (0.9 * moment + 0.1 * g.double()).sign()
        expected = expected * (1 - LR * 0.1) - LR * direction
        moment = 0.99 * moment + 0.01 * g.double()
        formulas.lion_(p, g, m, lr=LR, weight_decay=0.1)
    torch.testing.assert_close(p.double(), expected, rtol=0, atol=STEPS * 8 * 3 * ULP)


def test_lamb_ratio_is_one_where_a_norm_is_zero_and_is_clamped_elsewhere() -> None:
    assert formulas.lamb_ratio(0.0, 4.0) == 1.0
    assert formulas.lamb_ratio(4.0, 0.0) == 1.0
    assert formulas.lamb_ratio(16.0, 4.0) == 2.0
    assert formulas.lamb_ratio(16.0, 4.0, min_ratio=0.01, max_ratio=0.3) == 0.3
    assert formulas.lamb_ratio(1e-8, 4.0, min_ratio=0.01, max_ratio=0.3) == 0.01
    assert formulas.lamb_ratio(float("nan"), 4.0) != formulas.lamb_ratio(float("nan"), 4.0)


def test_lamb_direction_is_adams_plus_decay() -> None:
    p, g = torch.randn(50), torch.randn(50)
    m, v = torch.zeros(50), torch.zeros(50)
    formulas.lamb_moments_(g, m, v, betas=(0.9, 0.99), grad_scale=0.5)
    u = formulas.lamb_direction(torch.empty(50), p, m, v, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, step=1)
    expected = (g / 2) / ((g / 2).abs() + 1e-6) + 0.1 * p  # after one step both corrected moments are the gradient's
    torch.testing.assert_close(u, expected, rtol=1e-5, atol=1e-6)
