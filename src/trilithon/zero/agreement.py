"""Small numbers that all ranks agree on, each in one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trilithon.contracts import Collectives, ReduceOp, Tag
from trilithon.errors import TierError
from trilithon.zero.gradients import UnitGradients


@dataclass(frozen=True, slots=True)
class Settled:
    """What all ranks agree on before an update."""

    squared_norm: float  # of the mean gradient as it is stored (see `local` for local ones); tells if all is finite
    idle: frozenset[str]  # parameters that got no gradient on any rank in this window
    extra: tuple[float, ...]  # the caller's numbers, summed over ranks


class Agreement:
    """Every method is collective: all ranks call it with as many values and the same `what`, which names it."""

    def __init__(
        self, control: Collectives, device: torch.device, plain: Callable[[list[str]], list[str]] = list,
        every: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """plain: from the names of parameters to those in the plain model (a weight in tiles is one weight).
        every: the names of trained parameters on all ranks, when ranks hold different ones."""
        self._control, self._device, self._plain = control, device, plain
        self._place = {name: index for index, name in enumerate(every)} if every is not None else None
        self.step = -1  # for tags

    def sum(self, numbers: Sequence[float], what: str) -> list[float]:
        vector = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        self._control.all_reduce(vector, Tag(what, step=self.step)).wait()
        return [float(value) for value in vector.tolist()]  # one wait for the device, not one per element

    def any_rank(self, flags: Sequence[bool], what: str) -> list[bool]:
        """Which flags are up on at least one rank."""
        vector = torch.tensor(flags, dtype=torch.int32, device=self._device)
        self._control.all_reduce(vector, Tag(what, step=self.step), ReduceOp.MAX).wait()
        return [bool(value) for value in vector.tolist()]

    def raise_together(self, error: TierError | None, what: str) -> None:
        """Raises TierError on every rank, naming the ranks that failed, if any rank has an error."""
        if not self.any_rank([error is not None], what)[0]:
            return
        told = self.exchange(str(error) if error is not None else None, what)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        raise TierError(f"{what} failed on {len(failed)} of {len(told)} ranks. " + " ".join(failed)) from error

    def idle(self, gradients: Sequence[UnitGradients]) -> frozenset[str]:
        """The parameters that got no gradient on any rank in this window."""
        names = [field.name for one in gradients for field in one.unit.layout.fields]
        flags = [here for one in gradients for here in one.used]
        if self._place is not None:  # what another stage holds was not used here
            here = dict(zip(names, flags, strict=True))
            names = list(self._place)
            flags = [here.get(name, False) for name in names]
        used = self.any_rank(flags, "unused parameters")
        return frozenset(self._plain([name for name, here in zip(names, used, strict=True) if not here]))

    def exchange(self, value: Any, what: str) -> list[Any]:
        """One small value from every rank, in rank order."""
        return self._control.all_gather_object(value, Tag(what, step=self.step))
