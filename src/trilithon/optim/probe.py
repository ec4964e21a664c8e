"""Does an optimizer treat every element on its own? Found out by trying, on two dozen random numbers.

A rule may run on slices if cutting a parameter into pieces, each updated by itself, or giving it another shape changes
nothing. Norms, matrix products, clipping, factored moments and noise all fail that test. Gradients of very different
sizes are used, so that a rule which only sometimes looks across elements (clipping, say) is caught as well.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_NUMEL = 24
_CUTS = ((0, 1), (1, 9), (9, 24))
_SHAPES = ((24,), (4, 6), (2, 3, 4))
_GRADIENT_SIZES = (1.0, 1e-4, 30.0, 1e-2, 1e3, 1.0)
# Elementwise code may still round differently in vector bodies and tails (fused multiply-add): a few ulp of fp32 per
# step, over six steps. Rules that look across elements differ by orders of magnitude more.
_TOLERANCE = 1e-4


def why_not_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    """None if `optimizer`, with the settings of each of its groups, is elementwise; otherwise the reason it is not.

    The optimizer itself, its state and torch's random numbers are left as they were.
    """
    with torch.random.fork_rng(devices=[]):
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            if "lr" in settings and float(settings["lr"]) == 0.0:
                settings["lr"] = 1e-2  # a warm-up may begin at 0, which would hide everything
            try:
                reason = _compare(optimizer, settings)
            except Exception as error:  # whatever a stranger's step raises is the reason
                return f"a trial on small tensors raised {type(error).__name__}: {error}"
            if reason is not None:
                return reason
    return None


def _compare(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> str | None:
    generator = torch.Generator().manual_seed(24)
    start = torch.randn(_NUMEL, generator=generator)
    gradients = [size * torch.randn(_NUMEL, generator=generator) for size in _GRADIENT_SIZES]
    whole = _run(optimizer, settings, start, gradients, (_NUMEL,))
    if torch.equal(whole, start):
        return "a trial on small tensors did not move them"
    for shape in _SHAPES[1:]:
        if not _close(_run(optimizer, settings, start, gradients, shape), whole):
            return f"its result depends on the shape of a parameter ({_NUMEL} elements as one row or as {shape})"
    pieces = [_run(optimizer, settings, start[a:b], [g[a:b] for g in gradients], (b - a,)) for a, b in _CUTS]
    if not _close(torch.cat(pieces), whole):
        return "its result for an element depends on other elements (a norm, a mean, or noise)"
    return None


def _run(
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    start: Tensor,
    gradients: Sequence[Tensor],
    shape: tuple[int, ...],
) -> Tensor:
    parameter = torch.nn.Parameter(start.clone().reshape(shape))
    twin = _twin(optimizer, [{**copy.deepcopy(settings), "params": [parameter]}])
    for gradient in gradients:
        parameter.grad = gradient.clone().reshape(shape)
        twin.step()
    return parameter.detach().reshape(-1)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * 1e-3)


def _twin(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the same class and attributes with other parameters and no state.

    Made without calling the class, whose arguments are unknown. A `step` stored on the instance (schedulers wrap it) is
    bound to the original, so it is left out.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    shared = {"param_groups", "state", "defaults", "step"}
    memo = {id(p): p for group in optimizer.param_groups for p in group["params"]}  # never copy the user's parameters
    for key, value in vars(optimizer).items():
        if key not in shared:
            vars(twin)[key] = copy.deepcopy(value, memo)
    twin.defaults = optimizer.defaults
    twin.state = defaultdict(dict)
    twin.param_groups = groups
    return twin
