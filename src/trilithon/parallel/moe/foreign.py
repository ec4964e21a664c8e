"""Reading blocks that have experts already, as the models of Hugging Face write them.

Two ways of keeping experts are known: stacked parameters `gate_up_proj` [E, 2F, M] and `down_proj` [E, M, F], and a
list of modules with three matrices each, named gate_proj, up_proj, down_proj, or w1, w3, w2 (Mixtral). The router is a
matrix [E, M] called gate or router. Whether a block that looks so also computes so is for the caller to try out.
"""

# E experts, M width, F inner width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trilithon.parallel.moe.blocks import FeedForward
from trilithon.parallel.moe.forms import ACTIVATIONS

_LISTED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True, eq=False, slots=True)
class Found:
    """What a block with experts holds. router: [E, M]; stacks: by the names of `template`; normalised: the weights of
    the chosen experts sum to one."""

    router: Tensor
    stacks: dict[str, Tensor]
    activation: str
    k: int
    normalised: bool
    shared: nn.Module | None
    shared_gate: nn.Linear | None
    returns_logits: bool

    def template(self) -> nn.Module:
        """One expert, without values."""
        _, inner, width = self.stacks["up.weight"].shape
        return FeedForward(width, inner, activation=self.activation, gated=True, bias=False)


def read_block(module: nn.Module) -> Found | None:
    """What `module` holds if it is a block of experts as described above, else None."""
    router = getattr(module, "gate", getattr(module, "router", None))
    weight = getattr(router, "weight", None)
    experts = getattr(module, "experts", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(experts, nn.Module):
        return None
    read = _stacked(experts) if not isinstance(experts, nn.ModuleList) else _listed(experts)
    if read is None or read[0]["up.weight"].shape[0] != weight.shape[0]:
        return None
    stacks, act = read
    activation = _name_of(act)
    k = _first(router, module, ("top_k", "num_experts_per_tok"))
    if activation is None or not isinstance(k, int):
        return None
    normalised = _first(router, module, ("norm_topk_prob",))
    shared_gate = getattr(module, "shared_expert_gate", None)
    return Found(
        weight.detach(),
        stacks,
        activation,
        k,
        True if normalised is None else bool(normalised),
        getattr(module, "shared_expert", None),
        shared_gate if isinstance(shared_gate, nn.Linear) else None,
        isinstance(router, nn.Linear),  # releases before 5 returned the scores beside the output
    )


def _stacked(experts: nn.Module) -> tuple[dict[str, Tensor], Any] | None:
    both, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if not isinstance(both, Tensor) or not isinstance(down, Tensor) or both.dim() != 3 or down.dim() != 3:
        return None
    if both.shape[1] != 2 * down.shape[2] or both.shape[2] != down.shape[1]:
        return None
    gate, up = both.detach().chunk(2, dim=1)
    return {"gate.weight": gate, "up.weight": up, "down.weight": down.detach()}, getattr(experts, "act_fn", None)


def _listed(experts: nn.ModuleList) -> tuple[dict[str, Tensor], Any] | None:
    for names in _LISTED:
        parts = [[getattr(expert, name, None) for name in names] for expert in experts]
        if parts and all(isinstance(part, nn.Linear) and part.bias is None for row in parts for part in row):
            columns = [torch.stack([row[i].weight.detach() for row in parts]) for i in range(3)]  # type: ignore[union-attr]
            found = dict(zip(("gate.weight", "up.weight", "down.weight"), columns, strict=True))
            return found, getattr(experts[0], "act_fn", None)
    return None


def _name_of(act: Callable[[Tensor], Tensor] | None) -> str | None:
    if not callable(act):
        return None
    x = torch.linspace(-3, 3, 61, dtype=torch.float64, device="cpu")
    values = act(x.clone())
    return next((name for name, ours in ACTIVATIONS.items() if torch.allclose(ours(x), values, atol=1e-10)), None)


def _first(router: Any, module: nn.Module, names: tuple[str, ...]) -> Any:
    for holder in (router, module):
        for name in names:
            value = getattr(holder, name, None)
            if value is not None:
                return value
    return None
