"""LAMB over slices: Adam's direction, scaled per parameter by |weights| / |direction|.

You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes", arXiv:1904.00962,
algorithm 2, with the ratio clamped as in the BERT recipe of DeepSpeed. A parameter may be cut over ranks: its two norms
are made whole by one small sum over the ranks, two numbers per parameter in an order that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trilithon.contracts import ReduceOp, Shard, Slice, State, StateStore, SyncMode
from trilithon.kernels import sum_of_squares
from trilithon.kernels.chunks import chunks
from trilithon.optim.elementwise import Settings, read_updates
from trilithon.optim.formulas import lamb_direction, lamb_moments_, lamb_ratio
from trilithon.optim.participation import Participation, cut
from trilithon.tiers import ResidentStore, filled

_NAME = "lamb"


class Lamb:
    """`contracts.Update`. names: every parameter that any rank updates, in the same order on all ranks.

    Each group holds lr, betas, eps, and may hold weight_decay, bias_correction, min_ratio and max_ratio (no bounds).
    `combine` is called exactly once per step, also by a rank without slices. device: where the ranks add up the norms.
    """

    def __init__(
        self,
        groups: Sequence[Settings],
        names: Sequence[str],
        device: torch.device | str = "cpu",
        store: StateStore | None = None,
    ) -> None:
        self.groups = groups
        self._place = {name: index for index, name in enumerate(names)}
        self._device = device
        self._participation = Participation()
        self._store = store if store is not None else ResidentStore()

    def sync_mode(self, step: int) -> SyncMode:
        return SyncMode.MEAN

    @torch.no_grad()
    def apply(
        self,
        step: int,
        slices: Sequence[Slice],
        grad_scale: float,
        done: Callable[[Slice], None],
        combine: Callable[[Tensor, ReduceOp], Tensor],
    ) -> None:
        self._participation.begin(slices)
        squares = [[0.0, 0.0] for _ in self._place]  # of the weights and of the direction, per parameter
        for slice_ in slices:
            with self.state(slice_, write=True) as state:
                self._move_moments(slice_, state, grad_scale)
                for shard, weights, direction in self._directions(slice_, state):
                    mine = squares[self._place[shard.name]]
                    mine[0] += sum_of_squares(weights) / slice_.copies
                    mine[1] += sum_of_squares(direction) / slice_.copies
        packed = torch.tensor(squares, dtype=torch.float64, device=self._device).reshape(-1)
        totals = combine(packed, ReduceOp.SUM).reshape(-1, 2).tolist()
        for slice_ in slices:
            with self.state(slice_, write=True) as state:
                self._move_weights(slice_, state, totals)
            done(slice_)

    def _move_moments(self, slice_: Slice, state: Mapping[str, Tensor], grad_scale: float) -> None:
        settings = self.groups[slice_.group]
        betas = (float(settings["betas"][0]), float(settings["betas"][1]))
        for start, stop, _ in self._participation.runs(slice_):
            part, its = cut(slice_, state, start, stop)
            lamb_moments_(part.grad, its["exp_avg"], its["exp_avg_sq"], betas=betas, grad_scale=grad_scale)

    def _move_weights(self, slice_: Slice, state: Mapping[str, Tensor], totals: list[list[float]]) -> None:
        settings = self.groups[slice_.group]
        for shard, weights, direction in self._directions(slice_, state):
            ratio = lamb_ratio(
                *totals[self._place[shard.name]],
                min_ratio=float(settings.get("min_ratio", 0.0)),
                max_ratio=float(settings.get("max_ratio", float("inf"))),
            )
            weights.sub_(direction.mul_(float(settings["lr"]) * ratio))
        if slice_.low is not None:
            slice_.low.copy_(slice_.master)

    def _directions(self, slice_: Slice, state: Mapping[str, Tensor]) -> Iterator[tuple[Shard, Tensor, Tensor]]:
        """Cache-sized parts of every shard: (shard, weights [m], direction [m]); the direction is made anew each time.

        Making it twice costs arithmetic and saves a buffer as large as the parameters.
        """
        settings = self.groups[slice_.group]
        for shard in (shard for shard in slice_.shards if shard.name not in slice_.idle):
            span = slice(shard.offset, shard.offset + shard.numel)
            p, m, v = slice_.master[span], state["exp_avg"][span], state["exp_avg_sq"][span]
            for part in chunks(p):
                direction = lamb_direction(
                    torch.empty_like(p[part]),
                    p[part],
                    m[part],
                    v[part],
                    betas=(float(settings["betas"][0]), float(settings["betas"][1])),
                    eps=float(settings["eps"]),
                    weight_decay=float(settings.get("weight_decay", 0.0)),
                    step=self._participation.of(shard.name),
                    bias_correction=bool(settings.get("bias_correction", True)),
                )
                yield shard, p[part], direction

    @contextmanager
    def state(self, slice_: Slice, *, write: bool = False) -> Iterator[Mapping[str, Tensor]]:
        def make() -> State:
            return {name: filled(slice_.master, 0.0) for name in ("exp_avg", "exp_avg_sq")}

        with self._store.borrow(slice_.key, make, write=write) as state:
            yield {"master": slice_.master, **state}

    def state_dict(self) -> dict[str, Any]:
        return {"rule": _NAME, **self._participation.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._participation.load(read_updates(state, _NAME), state.get("missed", {}))

    def bytes(self) -> dict[str, int]:
        return self._store.bytes()

    def close(self) -> None:
        self._store.close()
