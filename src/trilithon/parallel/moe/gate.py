"""Routing: which experts each token goes to, which of its choices find room, and with what weights they count.

Scores and probabilities are computed in fp32 (fp64 for fp64), ties go to the lower expert, and the same inputs give the
same routing on every device. Tables hold one entry per token and choice; nothing here is of size tokens x experts x
capacity. (Top-1: Fedus et al. 2021, arXiv:2101.03961, section 2; top-2 and capacity: Lepikhin et al. 2020,
arXiv:2006.16668, section 2.2; random token selection: Kim et al. 2021, arXiv:2109.10465, section 4.)
"""

# S tokens, E experts, K choices per token, M width

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trilithon.errors import ConfigError

DropPolicy = Literal["position", "probs", "rts"]
Noise = Literal["Jitter", "RSample"]
NormTopK = Literal["none", "pre_drop", "post_drop"]

_JITTER = 0.01  # half the width of the factor on the router's input


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How tokens choose. capacity_factor: None for as much room as is needed.

    drop_policy: who keeps the slots of a crowded expert: the first in order (all first choices before all second ones),
    the most probable, or those that a lottery draws. noise and sample_second (k=2: the second expert is drawn among the
    others) act in training only.
    """

    k: int
    capacity_factor: float | None
    min_capacity: int
    drop_policy: DropPolicy
    noise: Noise | None = None
    sample_second: bool = False
    norm_topk: NormTopK = "post_drop"

    @property
    def random(self) -> bool:
        """The same input may be routed in different ways."""
        lottery = self.drop_policy == "rts" and self.capacity_factor is not None
        return self.noise is not None or lottery or (self.sample_second and self.k == 2)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Choice:
    """What was decided, without anything that has a gradient.

    experts: [S, K] i64, in order of choice; kept: [S, K] bool; capacity: slots per expert (None: as many as needed);
    routed, kept_counts: [E] i64, by expert, before and after dropping; used: [S] bool or None, tokens that are not
    padding, which alone are routed; complete: every choice is known to be kept.
    """

    experts: Tensor
    kept: Tensor
    capacity: int | None
    routed: Tensor
    kept_counts: Tensor
    used: Tensor | None
    complete: bool = False


def slots_per_expert(num_tokens: int, num_experts: int, k: int, factor: float, minimum: int) -> int:
    """min(S, max(minimum, ceil(k * factor * S / E))), in exact arithmetic, so that no two ranks round differently."""
    wanted = math.ceil(k * Fraction(str(factor)) * num_tokens / num_experts)
    return min(num_tokens, max(minimum, wanted))


def choose(scores: Tensor, k: int, second: Tensor | None = None) -> Tensor:
    """[S, E] -> [S, K] i64: the k highest, the lower index first among equals; NaN counts as lowest.

    second: [S, E] scores from which all choices after the first are taken instead.
    """
    left = scores.detach().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-torch.finfo(scores.dtype).max)
    chosen: list[Tensor] = []
    for place in range(k):
        if place == 1 and second is not None:
            left = second.detach().nan_to_num(nan=-math.inf, neginf=-torch.finfo(scores.dtype).max)
            left = left.scatter(1, torch.stack(chosen, 1), -math.inf)
        best = left.max(dim=1).indices  # the first one among equals
        chosen.append(best)
        if place + 1 < k:
            left = left.scatter(1, best.unsqueeze(1), -math.inf)
    return torch.stack(chosen, 1) if chosen else scores.new_empty(len(scores), 0, dtype=torch.int64)


def keep_within(experts: Tensor, capacity: int, priority: Tensor | None, counted: Tensor | None) -> Tensor:
    """[S, K] bool: at most `capacity` choices of each expert, the ones of highest priority.

    experts: [S, K]; priority: [S, K], None for choice-major order of position, which also breaks ties; counted: [S]
    bool, the tokens that take part.
    """
    flat = experts.t().reshape(-1)  # choice-major
    numel = flat.numel()
    if counted is not None:
        flat = torch.where(counted.repeat(experts.shape[1]), flat, -1)
    order = torch.arange(numel, device=flat.device)
    if priority is not None:
        order = torch.sort(priority.t().reshape(-1), descending=True, stable=True).indices
    by_expert = torch.sort(flat[order], stable=True)
    place = torch.arange(numel, device=flat.device) - torch.searchsorted(by_expert.values, by_expert.values)
    kept = torch.empty(numel, dtype=torch.bool, device=flat.device)
    kept[order[by_expert.indices]] = (place < capacity) & (by_expert.values >= 0)
    return kept.view(experts.shape[1], -1).t().contiguous()


def gumbel(shape: torch.Size, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel draws: -log of exponential ones."""
    draws = torch.empty(shape, dtype=dtype, device=generator.device)
    return -draws.exponential_(generator=generator).log()


def decide(
    logits: Tensor, probs: Tensor, rule: RoutingRule, used: Tensor | None, generator: torch.Generator | None
) -> Choice:
    """logits, probs: [S, E]. generator: source of chance in training, None outside it, where nothing is random."""
    num_tokens, num_experts = logits.shape
    scores, second = logits.detach(), None
    if generator is not None and rule.noise == "RSample":
        scores = scores + gumbel(scores.shape, generator, scores.dtype)
    if generator is not None and rule.sample_second and rule.k == 2:
        second = logits.detach() + gumbel(scores.shape, generator, scores.dtype)
    experts = choose(scores, rule.k, second)
    counted = experts if used is None else experts[used]
    routed = torch.bincount(counted.reshape(-1), minlength=num_experts)
    kept = torch.ones_like(experts, dtype=torch.bool) if used is None else used.unsqueeze(1).expand(-1, rule.k).clone()
    if rule.capacity_factor is None:
        return Choice(experts, kept, None, routed, routed, used, used is None)
    capacity = slots_per_expert(num_tokens, num_experts, rule.k, rule.capacity_factor, rule.min_capacity)
    draws = None
    if generator is not None and rule.drop_policy == "rts":  # drawn even if nothing is dropped: chance stays in step
        draws = torch.rand(num_tokens, generator=generator, device=logits.device)
    kept_counts = routed.clamp(max=capacity)
    crowded = bool(num_tokens) and (logits.is_cuda or int(routed.max()) > capacity)  # asking would stall a stream
    if crowded:
        kept = keep_within(experts, capacity, _priority(rule, probs, experts, draws), used)
    return Choice(experts, kept, capacity, routed, kept_counts, used, used is None and not crowded)


def _priority(rule: RoutingRule, probs: Tensor, experts: Tensor, draws: Tensor | None) -> Tensor | None:
    if rule.drop_policy == "position":
        return None
    if rule.drop_policy == "rts" and draws is not None:
        return draws.unsqueeze(1).expand(-1, rule.k)
    return probs.detach().gather(1, experts)


def combine_weights(probs: Tensor, choice: Choice, rule: RoutingRule) -> Tensor:
    """[S, K]: what each choice counts in the sum; zero where it was dropped.

    With one choice this is its probability, never normalised, or the router would learn nothing from the loss.
    """
    weights = probs.gather(1, choice.experts)
    if rule.k > 1 and rule.norm_topk == "pre_drop":
        weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
    weights = torch.where(choice.kept, weights, torch.zeros((), dtype=weights.dtype, device=weights.device))
    if rule.k > 1 and rule.norm_topk == "post_drop":
        weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
    return weights


class Gate(nn.Module):
    """The router's matrix, [E, M], without bias. It stays in fp32 whatever the model computes in."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        if num_experts < 1 or hidden_size < 1:
            raise ConfigError(f"a gate from {hidden_size} channels to {num_experts} experts: both must be at least 1.")
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear

    def forward(self, x_SM: Tensor, jitter: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """(logits, probabilities) [S, E], in fp32 or fp64. jitter: multiply the input by a factor close to 1."""
        dtype = torch.promote_types(torch.float32, torch.promote_types(x_SM.dtype, self.weight.dtype))
        x_SM = x_SM.to(dtype)
        if jitter is not None:
            noise = torch.rand(x_SM.shape, generator=jitter, device=x_SM.device, dtype=dtype)
            x_SM = x_SM * (1 - _JITTER + 2 * _JITTER * noise)
        with torch.autocast(x_SM.device.type, enabled=False):
            logits_SE = F.linear(x_SM, self.weight.to(dtype))
            return logits_SE, logits_SE.softmax(dim=-1)
