"""Lion and LAMB as the papers write them, one parameter at a time: references, not meant to be fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class PlainLion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): the sign of an interpolation of momentum and gradient."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = torch.sign(beta1 * momentum + (1 - beta1) * p.grad)
                p.sub_(group["lr"] * (direction + group["weight_decay"] * p))
                momentum.copy_(beta2 * momentum + (1 - beta2) * p.grad)


class PlainLamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2): Adam's direction, scaled per parameter by a trust ratio.

    The ratio ||w|| / ||u|| is limited to [min_ratio, max_ratio] and is 1 where either norm is 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        min_ratio: float = 0.01,
        max_ratio: float = 10.0,
        bias_correction: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "ratios": (min_ratio, max_ratio), "bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_one(p, p.grad, group, self.state[p])

    def _step_one(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        step = state["step"] = state.get("step", 0) + 1
        m = state["exp_avg"] = beta1 * state.get("exp_avg", 0.0) + (1 - beta1) * grad
        v = state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", 0.0) + (1 - beta2) * grad * grad
        if group["bias_correction"]:
            m, v = m / (1 - beta1**step), v / (1 - beta2**step)
        u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
        w_norm, u_norm = p.norm().item(), u.norm().item()
        low, high = group["ratios"]
        ratio = min(max(w_norm / u_norm, low), high) if w_norm > 0 and u_norm > 0 else 1.0
        p -= group["lr"] * ratio * u
