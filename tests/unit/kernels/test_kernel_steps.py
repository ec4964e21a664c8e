"""The update kernels: both implementations give the same bits, whatever the types, cuts, alignment and threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trilithon.kernels import adam_step, lion_step, sgd_step
from trilithon.kernels.threads import MIN_NUMEL_PER_THREAD

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMEL = 1031  # a prime: every vector loop has a tail
Operands = list[Tensor | None]
Step = Callable[[Operands], None]


def adam(operands: Operands, **changed: object) -> None:
    settings = {"lr": 0.01, "betas": (0.9, 0.99), "step": 3, "weight_decay": 0.1, "grad_scale": 0.37, **changed}
    adam_step(*operands, **settings)


def sgd(operands: Operands, **changed: object) -> None:
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1, "grad_scale": 0.37, **changed}
    p, g, buffer, _, low = operands
    sgd_step(p, g, buffer, low, **settings)


def lion(operands: Operands, **changed: object) -> None:
    settings = {"lr": 0.1, "weight_decay": 0.01, "grad_scale": 0.37, **changed}
    p, g, m, _, low = operands
    lion_step(p, g, m, low, **settings)


STEPS: dict[str, Step] = {
    "adamw": adam,
    "adam": lambda operands: adam(operands, decoupled=False),
    "adam without decay": lambda operands: adam(operands, decoupled=False, weight_decay=0.0),
    "sgd": sgd,
    "sgd first step": lambda operands: sgd(operands, first=True),
    "sgd nesterov": lambda operands: sgd(operands, nesterov=True, weight_decay=0.0),
    "lion": lion,
}


def make_operands(numel: int, grad: torch.dtype, low: torch.dtype | None) -> Operands:
    """p, g, m, v, low with gradients over many sizes, and with zeros of both signs, infinities and a NaN."""
    g = torch.randn(numel) * torch.randn(numel).mul(6).exp()
    g[:6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40])
    copy = None if low is None else torch.full((numel,), 7.0, dtype=low)
    return [torch.randn(numel), g.to(grad), 0.1 * torch.randn(numel), torch.rand(numel), copy]


def cloned(operands: Operands) -> Operands:
    return [None if tensor is None else tensor.clone() for tensor in operands]


def bits_equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal including the sign of zeros; one NaN is as good as another."""
    if a is None or b is None:
        return a is b
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())


def with_kernels(monkeypatch: pytest.MonkeyPatch, which: str, step: Step, operands: Operands) -> Operands:
    monkeypatch.setenv("TRILITHON_KERNELS", which)
    result = cloned(operands)
    step(result)
    return result


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("grad,low", itertools.product(DTYPES, (None, torch.bfloat16, torch.float16)))
def test_numba_and_torch_agree_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, name: str, grad: torch.dtype, low: torch.dtype | None
) -> None:
    pytest.importorskip("numba")
    operands = make_operands(NUMEL, grad, low)
    one = with_kernels(monkeypatch, "torch", STEPS[name], operands)
    other = with_kernels(monkeypatch, "numba", STEPS[name], operands)
    assert not bits_equal(one[0], operands[0])  # something moved
    assert [bits_equal(a, b) for a, b in zip(one, other)] == [True] * 5


@pytest.mark.parametrize("which", ["torch", "numba"])
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion"])
def test_the_result_does_not_depend_on_cuts_and_alignment(
    monkeypatch: pytest.MonkeyPatch, which: str, name: str
) -> None:
    if which == "numba":
        pytest.importorskip("numba")
    operands = make_operands(NUMEL, torch.bfloat16, torch.bfloat16)
    whole = with_kernels(monkeypatch, which, STEPS[name], operands)
    for cuts in ([0, 1, 64, 65, 640, NUMEL], [0, 3, 1000, NUMEL], [0, 513, 514, 515, NUMEL]):
        pieces = cloned(operands)
        for start, stop in itertools.pairwise(cuts):
            STEPS[name]([None if tensor is None else tensor[start:stop] for tensor in pieces])
        assert all(bits_equal(a, b) for a, b in zip(pieces, whole))


def test_chunks_of_the_torch_twin_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = make_operands(200_003, torch.bfloat16, torch.bfloat16)
    one = with_kernels(monkeypatch, "torch", adam, operands)
    monkeypatch.setattr("trilithon.kernels.chunks.CHUNK_NUMEL", 1 << 20)
    other = with_kernels(monkeypatch, "torch", adam, operands)
    assert all(bits_equal(a, b) for a, b in zip(one, other))


def test_threads_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    operands = make_operands(2 * MIN_NUMEL_PER_THREAD + 7, torch.bfloat16, torch.bfloat16)
    one = with_kernels(monkeypatch, "numba", adam, operands)
    torch.set_num_threads(2)
    other = with_kernels(monkeypatch, "numba", adam, operands)
    assert all(bits_equal(a, b) for a, b in zip(one, other))


def test_what_lies_around_a_slice_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv("TRILITHON_KERNELS", "numba")
    around = make_operands(NUMEL, torch.bfloat16, torch.bfloat16)
    before = cloned(around)
    adam([None if tensor is None else tensor[100:900] for tensor in around])
    for new, old in zip(around, before):
        assert new is not None and old is not None
        assert bits_equal(new[:100], old[:100]) and bits_equal(new[900:], old[900:])


@pytest.mark.parametrize("which", ["torch", "numba"])
def test_a_nan_gradient_never_passes_for_no_change(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    if which == "numba":
        pytest.importorskip("numba")
    for step in (adam, sgd, lion):
        operands = make_operands(NUMEL, torch.float32, torch.bfloat16)
        p, _, _, _, low = with_kernels(monkeypatch, which, step, operands)
        assert p is not None and low is not None
        assert p[4].isnan() and low[4].isnan()


def test_masters_in_fp64_run_on_torch() -> None:
    p, g, m, v, _ = (None if t is None else t.double() for t in make_operands(NUMEL, torch.float32, None))
    before = p.clone()
    adam([p, g, m, v, None], step=1)
    assert p.dtype == torch.float64 and not torch.equal(p, before)


def test_empty_slices_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for which in ("torch", "numba"):
        for step in STEPS.values():
            empty: Operands = [torch.empty(0) for _ in range(5)]
            with_kernels(monkeypatch, which, step, empty)
