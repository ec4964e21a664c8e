"""What the rules with a compressed phase have in common: the phase itself, its residuals, and the variance it rests on.

CompressedPart   none yet, what a checkpoint left of one, or the phase that runs; its part of the state
FrozenVariance   when the warm-up ends, and how often each parameter had been updated by then
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trilithon.contracts import ReduceOp, Slice
from trilithon.errors import ProtocolError
from trilithon.optim.elementwise import Settings
from trilithon.optim.freeze import Freeze
from trilithon.optim.link import Link
from trilithon.optim.participation import Participation
from trilithon.optim.phase import Compression, Phase, StateOf
from trilithon.optim.residuals import SavedResiduals, rank_state
from trilithon.tiers import bytes_by_tier

Combine = Callable[[Tensor, ReduceOp], Tensor]


class CompressedPart:
    """rule: its name, for messages. left_out: parameters that do not travel compressed, asked for when it begins."""

    def __init__(
        self, rule: str, link: Link | None, groups: Sequence[Settings], by: Compression,
        left_out: Callable[[], Collection[str]] = tuple,
    ) -> None:  # fmt: skip
        self.phase: Phase | None = None
        self._rule, self._link, self._groups, self._by, self._left_out = rule, link, groups, by, left_out
        self._scaling: dict[str, float] | None = None  # of this phase, once it has begun
        self._saved = SavedResiduals()

    def forget(self) -> None:
        """The phase is over, and so is what it had not sent."""
        self.phase, self._scaling, self._saved = None, None, SavedResiduals()

    def begin(self, slices: Sequence[Slice], state_of: StateOf) -> Phase:
        """Begin the phase, or go on with the one that was saved. Collective.

        Raises ProtocolError for a rule without a group of ranks.
        """
        if self._link is None:
            raise ProtocolError(f"{self._rule} has no group of ranks to average over; make it through initialize().")
        names = set(self._link.shapes) - set(self._left_out())
        self.phase = Phase.begin(
            self._link, self._groups, names, self._by, slices, state_of, self._saved, self._scaling
        )
        self._scaling = self.phase.exchange.scaling
        return self.phase

    # ------------------------------------------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        return {"scaling": self._scaling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.forget()
        scaling = state.get("scaling")
        self._scaling = None if scaling is None else {str(name): float(value) for name, value in scaling.items()}

    def rank_state(self) -> dict[str, Tensor]:
        """As `contracts.Update.rank_state`."""
        if self.phase is not None:
            return rank_state(self.phase.exchange.reduce)
        if self._link is None:
            return {}
        return self._saved.pending(self._numel(), self._link.group.rank, self._link.group.world_size)

    def load_rank_state(
        self, state: Mapping[str, Tensor], saved_ranks: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        """As `contracts.Update.load_rank_state`."""
        self._saved.take(state, saved_ranks, self._numel())

    def bytes(self, *others: Mapping[str, int]) -> dict[str, int]:
        """By tier, with what the rule keeps besides."""
        own = [*self.rank_state().values()]
        if self.phase is not None:
            own.append(self.phase.vector.flat)
        found = bytes_by_tier(own)
        for kept in others:
            for tier, size in kept.items():
                found[tier] = found.get(tier, 0) + size
        return found

    def _numel(self) -> int:
        left_out, shapes = set(self._left_out()), self._link.shapes if self._link is not None else {}
        return sum(size.numel() for name, size in shapes.items() if name not in left_out)


class FrozenVariance:
    """counts: how often each parameter had been updated when its variance was frozen; None during the warm-up."""

    def __init__(self, freeze: Freeze, groups: Sequence[Settings], device: torch.device) -> None:
        self.counts: Participation | None = None
        self._freeze, self._groups, self._device = freeze, groups, device

    def over(self, step: int) -> bool:
        """Step number `step` comes after the warm-up."""
        return self._freeze.over(step)

    def observe(self, step: int, slices: Sequence[Slice], state_of: StateOf, combine: Combine) -> None:
        """After update `step` of the warm-up. Collective where the end is found automatically."""

        def variance() -> float:
            total = torch.zeros(1, dtype=torch.float64, device=self._device)
            for slice_ in slices:
                with state_of(slice_) as state:
                    total += state["exp_avg_sq"].sum(dtype=torch.float64)
            return float(combine(total, ReduceOp.SUM))

        first = self._groups[0]
        self._freeze.observe(step, float(first["betas"][1]), float(first["lr"]), variance)

    def freeze(self, updates: Participation) -> None:
        """The variance is fixed from here on, unless it was already."""
        if self.counts is None:
            self.counts = updates.copy()

    def thaw(self) -> None:
        """The warm-up goes on (it was lengthened on resume)."""
        self.counts = None

    def state_dict(self) -> dict[str, Any]:
        counts = self.counts.state_dict() if self.counts is not None else None
        return {"freeze": self._freeze.state_dict(), "frozen": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._freeze.load_state_dict(state.get("freeze", {}))
        self.counts = None
        if state.get("frozen") is not None:
            self.counts = Participation()
            self.counts.load(int(state["frozen"]["updates"]), state["frozen"]["missed"])
