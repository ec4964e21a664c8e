"""What one rank computes: its chunks of layers, with random numbers and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trilithon.parallel.pipeline.layers import Layer
from trilithon.parallel.pipeline.plan import StagePlan
from trilithon.parallel.pipeline.seeds import layer_seed, seed_generators

Again = Callable[[Callable[[Any], Any], Any], Any]
"""(function, x) -> function(x), whose activations are computed again in backward."""


class Stage:
    """The layers of `plan.stage`. again: how `interval` layers together are recomputed; 0 for none.

    recomputable: names of the classes of which a group must consist; None for any.
    """

    def __init__(
        self, layers: Sequence[Layer], plan: StagePlan, *, interval: int = 0, again: Again | None = None,
        recomputable: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.plan, self._layers = plan, list(layers)
        self._interval, self._again, self._recomputable = interval, again, recomputable

    def is_first(self, chunk: int) -> bool:
        return self.plan.stage == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        return self.plan.stage == self.plan.stages - 1 and chunk == self.plan.chunks - 1

    def run(self, chunk: int, x: Any, draw: int | None, micro: int) -> Any:
        """x through the layers of one chunk. draw: of this step; None leaves the generators alone."""
        part = self.plan.part(chunk)
        size = self._interval or len(part)
        for first in range(part.start, part.stop, size):
            group = range(first, min(first + size, part.stop))
            if self._interval and self._may_repeat(group) and torch.is_grad_enabled():
                assert self._again is not None
                x = self._again(self._runner(group, draw, micro), x)
            else:
                x = self._runner(group, draw, micro)(x)
        return x

    def _may_repeat(self, group: range) -> bool:
        return self._recomputable is None or all(self._layers[i].kind in self._recomputable for i in group)

    def _runner(self, group: range, draw: int | None, micro: int) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            for index in group:
                if draw is not None:
                    seed_generators(layer_seed(draw, micro, index))
                x = self._layers[index].run(x)
            return x

        return run
