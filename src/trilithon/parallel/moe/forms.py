"""Is this module a plain feed-forward block? If so, many of them run as a few batched products.

A module cannot be asked what it computes, so it is tried: its linear layers are put into each form we know, and the one
that gives the module's own outputs on random weights and inputs (in fp64, in training mode, with layers of a few
channels in the place of its own) is what it computes. A module with dropout, norms, or anything else beside them gives
other outputs, or none, and runs as it is, one expert at a time.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "squared_relu": _squared_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class Form:
    """down(act(up(x))), or down(act(gate(x)) * up(x)). up, down, gate: names of the linear layers."""

    activation: str
    up: str
    down: str
    gate: str | None = None

    def run(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """x: [n, M] with one expert's weights, or [experts, n, M] with stacked ones."""
        act = ACTIVATIONS[self.activation]
        inner = _linear(x, weights, self.up)
        inner = act(inner) if self.gate is None else act(_linear(x, weights, self.gate)) * inner
        return _linear(inner, weights, self.down)


def _linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if x.dim() == 2:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


@torch.no_grad()
def recognise(expert: nn.Module) -> Form | None:
    """The form of `expert`, or None if it is none of ours. The module and its random state stay as they are."""
    linears = {
        n: m for n, m in expert.named_modules() if isinstance(m, nn.Linear) and type(m).forward is nn.Linear.forward
    }
    inside = {f"{name}.{own}" for name, module in linears.items() for own, _ in module.named_parameters(recurse=False)}
    if len(linears) not in (2, 3) or inside != {name for name, _ in expert.named_parameters()} or "" in linears:
        return None
    if any(True for _ in expert.buffers()):
        return None
    trial = _narrow(expert).train()
    generator = torch.Generator().manual_seed(20240229)
    for param in trial.parameters():
        param.copy_(
            torch.randn(param.shape, generator=generator, dtype=torch.float64, device="cpu")
            / max(param.shape[-1], 1) ** 0.5
        )
    weights = dict(trial.named_parameters())
    for form in _candidates(linears):
        width = weights[f"{form.up}.weight"].shape[1]
        x = torch.randn(5, width, generator=generator, dtype=torch.float64, device="cpu")
        if _agree(trial, form, x, weights):
            return form
    return None


def _narrow(expert: nn.Module) -> nn.Module:
    """The same module with few channels: 3 in the place of its smallest width, 5 of the next, and so on."""
    nothing: dict[int, Any] = {id(param): nn.Parameter(torch.empty(0, device="cpu")) for param in expert.parameters()}
    trial = copy.deepcopy(expert, nothing)  # without copying values
    linears = [part for part in trial.modules() if isinstance(part, nn.Linear)]
    sizes = sorted({size for one in linears for size in (one.in_features, one.out_features)})
    few = {size: 3 + 2 * index for index, size in enumerate(sizes)}
    for one in linears:
        one.in_features, one.out_features = few[one.in_features], few[one.out_features]
        shape = (one.out_features, one.in_features)
        one.weight = nn.Parameter(torch.empty(shape, dtype=torch.float64, device="cpu"))
        if one.bias is not None:
            one.bias = nn.Parameter(torch.empty(shape[:1], dtype=torch.float64, device="cpu"))
    return trial


def _candidates(linears: Mapping[str, nn.Linear]) -> list[Form]:
    found = []
    for names in itertools.permutations(linears):
        up, down, gate = linears[names[0]], linears[names[1]], linears[names[2]] if len(names) == 3 else None
        chained = up.out_features == down.in_features and up.in_features == down.out_features
        beside = gate is None or (gate.in_features, gate.out_features) == (up.in_features, up.out_features)
        if chained and beside:
            third = names[2] if gate is not None else None
            found += [Form(activation, names[0], names[1], third) for activation in ACTIVATIONS]
    return found


def _agree(trial: nn.Module, form: Form, x: Tensor, weights: Mapping[str, Tensor]) -> bool:
    try:
        with torch.random.fork_rng(devices=[]):
            theirs = trial(x)
    except Exception:  # it wants other inputs than rows; then it runs as it is, and says so itself
        return False
    if not isinstance(theirs, Tensor) or theirs.shape != x.shape:
        return False
    return torch.allclose(theirs, form.run(x, weights), rtol=1e-10, atol=1e-10)
