"""LAMB over slices: Adam's direction, scaled per tensor by |weights| / |direction|; each expert is a tensor of its own.

You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes", arXiv:1904.00962,
algorithm 2, with the ratio clamped as in the BERT recipe of DeepSpeed. A tensor may be cut over ranks: its two norms
are made whole by one small sum over the ranks, two numbers per tensor in an order that all ranks share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trilithon.contracts import ReduceOp, Slice, StateStore, SyncMode
from trilithon.errors import TierError
from trilithon.kernels import sum_of_squares
from trilithon.kernels.chunks import chunks
from trilithon.optim.elementwise import READ_AHEAD, Settings, read_updates
from trilithon.optim.formulas import lamb_direction, lamb_moments_, lamb_ratio
from trilithon.optim.participation import Participation, cut
from trilithon.optim.tensors import NormTable, Stack
from trilithon.tiers import HostLink, ResidentStore, filled, home_of

_NAME = "lamb"
LAMB_FIELDS = ("exp_avg", "exp_avg_sq")


class Lamb:
    """`contracts.Update`. names: every parameter that any rank updates, in the same order on all ranks. stacks: by
    name, those whose members have a norm each.

    Each group holds lr, betas, eps, and may hold weight_decay, bias_correction, min_ratio and max_ratio (no bounds).
    `combine` is called exactly once per step, also by a rank without slices. device: where the ranks add up the norms.
    """

    def __init__(
        self,
        groups: Sequence[Settings],
        names: Sequence[str],
        device: torch.device | str = "cpu",
        store: StateStore | None = None,
        stacks: Mapping[str, Stack] | None = None,
    ) -> None:
        self.groups = groups
        self.tensors = NormTable(names, stacks)
        self._device = device
        self.totals: list[list[float]] = []  # squares of weights and direction in the last step, by row of `tensors`
        self.participation = Participation()
        self._store = store if store is not None else ResidentStore()
        self._link = HostLink()

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
        self.participation.begin(slices)
        squares = [[0.0, 0.0] for _ in range(len(self.tensors))]  # of the weights and of the direction
        failure: TierError | None = None
        try:
            for slice_, state in self._borrowed(slices):
                if state is None:
                    continue
                with self._link.near(slice_, home_of(slice_, state), write=False) as near:
                    self._move_moments(near, state, grad_scale)
                for row, weights, direction in self._directions(slice_, state):
                    mine = squares[row]
                    mine[0] += sum_of_squares(weights) / slice_.copies
                    mine[1] += sum_of_squares(direction) / slice_.copies
        except TierError as error:  # the other ranks wait for the sums
            failure = error
        packed = torch.tensor(squares, dtype=torch.float64, device=self._device).reshape(-1)
        self.totals = totals = combine(packed, ReduceOp.SUM).reshape(-1, 2).tolist()
        if failure is not None:
            raise failure
        for slice_, state in self._borrowed(slices):
            if state is not None:
                self._move_weights(slice_, state, totals)
            done(slice_)

    def _borrowed(self, slices: Sequence[Slice]) -> Iterator[tuple[Slice, Mapping[str, Tensor] | None]]:
        """Each slice with its state, to be changed, while the next ones are read; None where nothing moves."""
        moving = [slice_ for slice_ in slices if any(shard.name not in slice_.idle for shard in slice_.shards)]
        following = iter(moving)
        ahead = list(itertools.islice(following, READ_AHEAD + 1))
        for slice_ in slices:
            if not ahead or slice_ is not ahead[0]:
                yield slice_, None
                continue
            ahead.pop(0)
            with self.state(slice_, write=True) as state:
                for coming in ahead:
                    self._store.prefetch(coming.key)
                ahead += itertools.islice(following, 1)
                yield slice_, state

    def _move_moments(self, slice_: Slice, state: Mapping[str, Tensor], grad_scale: float) -> None:
        settings = self.groups[slice_.group]
        betas = (float(settings["betas"][0]), float(settings["betas"][1]))
        for start, stop, _ in self.participation.runs(slice_):
            part, its = cut(slice_, state, start, stop)
            lamb_moments_(part.grad, its["exp_avg"], its["exp_avg_sq"], betas=betas, grad_scale=grad_scale)

    def _move_weights(self, slice_: Slice, state: Mapping[str, Tensor], totals: list[list[float]]) -> None:
        settings = self.groups[slice_.group]
        for row, weights, direction in self._directions(slice_, state):
            ratio = lamb_ratio(
                *totals[row],
                min_ratio=float(settings.get("min_ratio", 0.0)),
                max_ratio=float(settings.get("max_ratio", float("inf"))),
            )
            weights.sub_(direction.mul_(float(settings["lr"]) * ratio))
        if slice_.low is not None:
            slice_.low.copy_(state["master"])

    def _directions(self, slice_: Slice, state: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Cache-sized parts of every tensor: (row, weights [m], direction [m]); the direction is made anew each time.

        Making it twice costs arithmetic and saves a buffer as large as the parameters.
        """
        settings = self.groups[slice_.group]
        moving = (one for one in slice_.shards if one.name not in slice_.idle)
        for shard, (row, start, stop) in ((one, part) for one in moving for part in self.tensors.parts(one)):
            span = slice(start, stop)
            p, m, v = state["master"][span], state["exp_avg"][span], state["exp_avg_sq"][span]
            for part in chunks(p):
                direction = lamb_direction(
                    torch.empty_like(p[part]),
                    p[part],
                    m[part],
                    v[part],
                    betas=(float(settings["betas"][0]), float(settings["betas"][1])),
                    eps=float(settings["eps"]),
                    weight_decay=float(settings.get("weight_decay", 0.0)),
                    step=self.participation.of(shard.name),
                    bias_correction=bool(settings.get("bias_correction", True)),
                )
                yield row, p[part], direction

    @contextmanager
    def state(self, slice_: Slice, *, write: bool = False) -> Iterator[Mapping[str, Tensor]]:
        with self._store.borrow(slice_.key, dict, write=write) as state:
            for name in LAMB_FIELDS:
                if name not in state:
                    state[name] = filled(state.get("master", slice_.master), 0.0)
            yield {"master": slice_.master, **state}

    def state_dict(self) -> dict[str, Any]:
        return {"rule": _NAME, **self.participation.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.participation.load(read_updates(state, _NAME), state.get("missed", {}))

    def rank_state(self) -> dict[str, Tensor]:
        return {}

    def load_rank_state(
        self, state: Mapping[str, Tensor], saved_ranks: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        """Nothing here belongs to a rank."""

    def synchronize(self, slices: Sequence[Slice]) -> bool:
        return False

    def bytes(self) -> dict[str, int]:
        return self._store.bytes()

    def close(self) -> None:
        self._store.close()
        self._link.close()
