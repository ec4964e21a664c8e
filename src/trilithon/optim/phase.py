"""The compressed phase of a rule: what is set up when it begins, and how momenta of this rank enter the vector."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from trilithon.comm.compressor import Compressor
from trilithon.contracts import Slice
from trilithon.kernels.chunks import chunks, read_gradient_, scratch
from trilithon.optim.elementwise import Settings
from trilithon.optim.exchange import Exchange
from trilithon.optim.fused import Fused, whole_vector
from trilithon.optim.link import Link
from trilithon.optim.masks import active_elements
from trilithon.optim.residuals import SavedResiduals
from trilithon.optim.scaling import equalising_factors


@dataclass(frozen=True, slots=True)
class Compression:
    """worker, server: how ranks and servers compress (None: alike). target: what is averaged in compressed form."""

    worker: Compressor
    server: Compressor | None = None
    target: Literal["momentum", "gradient"] = "momentum"
    error_feedback: bool = True
    auto_mask: bool = True
    per_tensor_scaling: bool = False


class StateOf(Protocol):
    """`contracts.Update.state` of a rule with `exp_avg` and `exp_avg_sq`."""

    def __call__(self, slice_: Slice, *, write: bool = False) -> AbstractContextManager[Mapping[str, Tensor]]: ...


@dataclass(slots=True)
class Phase:
    """One rule's compressed exchange with what a resume adds to it once."""

    exchange: Exchange
    rest: Tensor | None = field(default=None)  # [numel] sent with the first step, in the exchange's scaled units

    @property
    def vector(self) -> Fused:
        return self.exchange.vector

    @staticmethod
    def begin(  # noqa: PLR0917 (three rules call it, each with all of it)
        link: Link, groups: Sequence[Settings], names: Collection[str], by: Compression, slices: Sequence[Slice],
        state_of: StateOf, saved: SavedResiduals, scaling: Mapping[str, float] | None = None,
    ) -> Phase:  # fmt: skip
        """Make the vector, its momentum, mask, scaling and residuals. Collective.

        scaling: that of the run that was saved; None to find it now, if `by` asks for it.
        """
        exchange = Exchange(link, names, by.worker, by.server, error_feedback=by.error_feedback)
        vector = exchange.vector
        found = scaling is None and by.per_tensor_scaling
        if by.target == "momentum" or found:
            momentum = whole_vector(vector, slices, state_of, "exp_avg", link.group, complete=link.whole)
            if found:
                scaling = equalising_factors(vector, momentum, link.group)
            if by.target == "momentum":
                vector.flat[: vector.numel] = momentum
        exchange.scaling = dict(scaling or {})
        rest = saved.hand_over(exchange.reduce, link.group.rank)
        phase = Phase(exchange, rest)
        phase.mask(link, groups, by, slices, state_of)
        return phase

    def mask(
        self, link: Link, groups: Sequence[Settings], by: Compression, slices: Sequence[Slice], state_of: StateOf
    ) -> None:
        """Leave out what has no variance or is masked by the user, from now on. Collective."""
        variance = None
        if by.auto_mask:
            variance = whole_vector(self.vector, slices, state_of, "exp_avg_sq", link.group, complete=link.whole)
        active = active_elements(self.vector, groups, variance)
        self.exchange.mask(active)
        if active is not None:
            self.drop_masked(slices, state_of)

    def drop_masked(self, slices: Sequence[Slice], state_of: StateOf) -> None:
        """The momentum of masked elements becomes zero."""
        if self.exchange.active is None:
            return
        for slice_ in slices:
            with state_of(slice_, write=True) as state:
                for shard, here in self.vector.pieces(slice_, self.exchange.active):
                    state["exp_avg"][shard.offset : shard.offset + shard.numel].mul_(here)

    def add_rest(self) -> None:
        """What a run of several ranks had not sent, when it goes on as one rank."""
        if self.rest is not None:
            for name in self.vector.names:
                factor = self.exchange.scaling.get(name, 1.0)
                self.vector.view(name).add_(self.vector.view(name, self.rest), alpha=1.0 / factor)
            self.rest = None


def groups_by_name(groups: Sequence[Settings]) -> dict[str, int]:
    """Parameter name -> index of its group."""
    return {str(name): index for index, group in enumerate(groups) for name in group.get("params", ())}


def blend_(average: Tensor, value: Tensor, beta: float, scale: float) -> None:
    """average [n] = average + (scale * value - average) * (1 - beta), rounded as Adam's momentum is."""
    (temp,) = scratch(average, 1)
    for part in chunks(average):
        here, change = average[part], temp[: part.stop - part.start]
        read_gradient_(change, value[part], scale).sub_(here)
        here.add_(change.mul_(1.0 - beta))


def preconditioner(settings: Settings, updates: int, frozen: int) -> tuple[float, float]:
    """(1 / c1, 1 / sqrt(c2)): the bias corrections of a momentum after `updates` and of a variance after `frozen`."""
    if not settings.get("bias_correction", True):
        return 1.0, 1.0
    beta1, beta2 = float(settings["betas"][0]), float(settings["betas"][1])
    return 1.0 / (1.0 - beta1**updates), (1.0 - beta2**frozen) ** -0.5 if frozen else 1.0


def device_of(link: Link | None) -> torch.device:
    return link.device if link is not None else torch.device("cpu")
