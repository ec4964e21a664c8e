"""What the ranks of a training run must decide together, so that none goes on while another stops."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeVar

import torch

from trilithon.contracts import Collectives, ReduceOp, Tag
from trilithon.errors import TrilithonError

T = TypeVar("T")


class Agreement:
    """One group's decisions; with a group of one everything is local."""

    def __init__(self, group: Collectives) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    def requests(self, step: int, *, stop: int, save: bool) -> tuple[int, bool]:
        """What signals ask for, from what each rank got: the largest signal to stop for (0: none), and whether to save.

        The one thing that ranks exchange after every step besides the step itself: 16 bytes from each.
        """
        asked = torch.tensor([float(stop), float(save)], dtype=torch.float64)
        self._group.all_reduce(asked, Tag("pretrain.requests", step=step), ReduceOp.MAX).wait()
        return int(asked[0]), bool(asked[1])

    def largest(self, value: int, about: str) -> int:
        """The largest of the ranks' values."""
        found = torch.tensor([float(value)], dtype=torch.float64)
        self._group.all_reduce(found, Tag(about), ReduceOp.MAX).wait()
        return int(found)

    def weighted_mean(self, total: float, weight: float, about: str) -> float:
        """Sum of totals over sum of weights; NaN when no rank has any weight."""
        both = torch.tensor([total, weight], dtype=torch.float64)
        self._group.all_reduce(both, Tag(about), ReduceOp.SUM).wait()
        return float(both[0] / both[1]) if both[1] > 0 else math.nan

    def on_first_rank(self, action: Callable[[], T], about: str) -> T:
        """The result of rank 0's action, which must be picklable, or its error raised on every rank."""
        return self._shared(action, about, leads=self.rank == 0, leader=0)

    def on_first_rank_of_host(self, action: Callable[[], T], about: str) -> T:
        """As `on_first_rank`, once on each host: for what is written to a local disk."""
        local = int(os.environ.get("LOCAL_RANK", "0")) if self.world_size > 1 else 0
        return self._shared(action, about, leads=local == 0, leader=self.rank - local)

    def _shared(self, action: Callable[[], T], about: str, *, leads: bool, leader: int) -> T:
        result: T | None = None
        failure: TrilithonError | None = None
        if leads:
            try:
                result = action()
            except TrilithonError as error:
                failure = error
        everyone = self._group.all_gather_object((result, failure), Tag(about))
        for _, told in everyone:
            if told is not None:
                raise told
        shared: T = everyone[leader][0]
        return shared
