"""1-bit LAMB: LAMB while the variance settles, then compressed momentum with trust ratios that are carried on.

Warm-up is LAMB, bit for bit, and averages each tensor's trust ratio into cbar. Then the momenta of all parameters
are averaged in one compressed vector, in which fixed factors bring them to one magnitude. A trust ratio of such a
noisy momentum would mean little; instead cbar is multiplied by a factor r that follows how the second moment moves:

    ghat = (m - beta1 * m_before) / (1 - beta1)                 the gradient that the new momentum stands for
    vf   = beta2 * vf + (1 - beta2) * ghat^2                    a fresh second moment beside the frozen v
    r    = max over elements of (sqrt(v) + eps) / (sqrt(vf) + eps), bounded, and slow to change
    p    = p - lr * r * cbar * (m / (sqrt(v) + eps) + decay * p)

(Li et al. 2022, arXiv:2104.06069, algorithm 1.) Departures: the mean of trust ratios starts without bias; where bias is
corrected, both second moments are, each with its own count; elements that are masked do not enter the maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trilithon.comm.sign import Sign
from trilithon.config.compressed import OneBitLamb as OneBitLambConfig
from trilithon.contracts import ReduceOp, Shard, Slice, State, SyncMode
from trilithon.errors import CheckpointError
from trilithon.kernels.chunks import chunks, square_root
from trilithon.optim.compressed_part import CompressedPart, FrozenVariance
from trilithon.optim.elementwise import Settings, read_updates
from trilithon.optim.formulas import lamb_ratio
from trilithon.optim.freeze import Freeze
from trilithon.optim.lamb import Lamb
from trilithon.optim.link import Link
from trilithon.optim.phase import Compression, Phase, blend_, device_of, groups_by_name, preconditioner
from trilithon.optim.tensors import NormTable, Stack
from trilithon.tiers import ResidentStore, settle

_NAME = "onebit_lamb"
_FRESH = "exp_avg_sq_fresh"


class TrustRatios:
    """Each tensor's mean trust ratio from the warm-up, and the factor that it is multiplied by afterwards."""

    def __init__(self, section: OneBitLambConfig) -> None:
        self._section = section
        self._means: dict[str, tuple[float, int]] = {}  # running mean as it is summed, number of samples
        self._factors: dict[str, float] = {}
        self.last: dict[str, float] = {}  # what multiplied the direction in the last step

    def sample(self, name: str, ratio: float) -> None:
        """One trust ratio of the warm-up."""
        mean, count = self._means.get(name, (0.0, 0))
        beta = self._section.coeff_beta
        self._means[name] = (beta * mean + (1.0 - beta) * ratio, count + 1)
        self.last[name] = ratio

    def mean(self, name: str) -> float:
        """Of the warm-up, without the bias of starting at zero; 1 for a parameter without samples."""
        mean, count = self._means.get(name, (0.0, 0))
        return mean / (1.0 - self._section.coeff_beta**count) if count else 1.0

    def next(self, name: str, ratio: float, share: float) -> float:
        """The coefficient of this step. ratio: largest of old over fresh variance; share: |m-part| / |direction|."""
        by, before = self._section, self._factors.get(name, 1.0)
        factor = share * ratio + (1.0 - share)
        factor = min(max(factor, by.factor_min), by.factor_max)
        factor = min(max(factor, (1.0 - by.factor_threshold) * before), (1.0 + by.factor_threshold) * before)
        self._factors[name] = factor
        self.last[name] = factor * self.mean(name)
        return self.last[name]

    def forget(self) -> None:
        self._means, self._factors = {}, {}

    def state_dict(self) -> dict[str, Any]:
        return {"means": {name: list(pair) for name, pair in self._means.items()}, "factors": dict(self._factors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means = {str(name): (float(mean), int(count)) for name, (mean, count) in state.get("means", {}).items()}
        self._factors = {str(name): float(factor) for name, factor in state.get("factors", {}).items()}


class OneBitLamb:
    """`contracts.Update`. Groups as for `Lamb`, and exp_avg_mask. link: None where there is only a warm-up."""

    continues = ("lamb",)  # rules whose state this one takes over
    sometimes = (_FRESH,)  # state of the compressed phase only

    def __init__(
        self, groups: Sequence[Settings], names: Sequence[str], section: OneBitLambConfig, link: Link | None,
        stacks: Mapping[str, Stack] | None = None,
    ) -> None:  # fmt: skip
        self.groups = groups
        self._tensors, self._group_of = NormTable(names, stacks), groups_by_name(groups)
        self._link = link
        by = Compression(
            Sign(section.scale_norm), auto_mask=section.auto_mask, per_tensor_scaling=section.per_tensor_scaling
        )
        self._warm = Lamb(groups, names, device_of(link), stacks=stacks)
        self._ratios = TrustRatios(section)
        self._fresh = ResidentStore()
        self._frozen = FrozenVariance(Freeze(section.freeze_step), groups, device_of(link))
        self._part = CompressedPart(_NAME, link, groups, by)

    def sync_mode(self, step: int) -> SyncMode:
        return SyncMode.LOCAL if self._frozen.over(step) else SyncMode.MEAN

    def coefficients(self) -> list[float]:
        """What multiplied each tensor's direction in the last step: one for each parameter, one for each expert of a
        stack, in the order of the names."""
        return [self._ratios.last.get(label, 1.0) for label in self._tensors.labels]

    @torch.no_grad()
    def apply(
        self,
        step: int,
        slices: Sequence[Slice],
        grad_scale: float,
        done: Callable[[Slice], None],
        combine: Callable[[Tensor, ReduceOp], Tensor],
    ) -> None:
        if self._frozen.over(step):
            self._compressed_step(step, slices, grad_scale, done, combine)
            return
        if self._frozen.counts is not None:  # the warm-up was lengthened: it samples anew, what was lost is forgotten
            self._leave()
        self._warm.apply(step, slices, grad_scale, done, combine)
        idle = slices[0].idle if slices else frozenset()
        rows = zip(self._tensors.labels, self._tensors.parameters, self._warm.totals, strict=True)
        for label, name, (weights, direction) in rows:
            settings = self.groups[self._group_of[name]]
            bounds = {key: float(settings[key]) for key in ("min_ratio", "max_ratio") if key in settings}
            if name not in idle:
                self._ratios.sample(label, lamb_ratio(weights, direction, **bounds))
        self._frozen.observe(step, slices, self.state, combine)

    # -------------------------------------------------------------------------------------------- compressed phase
    def _leave(self) -> None:
        self._frozen.thaw()
        self._part.forget()
        self._ratios.forget()
        self._fresh.close()

    def _enter(self, slices: Sequence[Slice]) -> Phase:
        """From here on the variance is fixed. Collective; also after a resume, with what was saved."""
        phase = self._part.begin(slices, self.state)
        self._frozen.freeze(self._warm.participation)
        return phase

    def _compressed_step(
        self,
        step: int,
        slices: Sequence[Slice],
        grad_scale: float,
        done: Callable[[Slice], None],
        combine: Callable[[Tensor, ReduceOp], Tensor],
    ) -> None:
        phase = self._part.phase or self._enter(slices)
        assert self._link is not None
        self._warm.participation.begin(slices)
        taking_part = set()
        for name, grad in self._link.gradients():
            if name in phase.vector:
                taking_part.add(name)
                blend_(phase.vector.view(name), grad, self._beta1(name), grad_scale)
        phase.add_rest()
        phase.exchange.average(taking_part, step)
        squares, largest = [[0.0, 0.0] for _ in range(len(self._tensors))], [0.0 for _ in range(len(self._tensors))]
        for slice_ in slices:
            with self.state(slice_, write=True) as state:
                self._move_state(slice_, state, phase)
                for row, shard, part, moment, weights in self._directions(slice_, state):
                    squares[row][0] += float(moment.double().square().sum())
                    squares[row][1] += float(weights.double().square().sum())
                    largest[row] = max(largest[row], self._largest_ratio(slice_, state, phase, shard, part))
        device = device_of(self._link)
        summed = combine(torch.tensor(squares, dtype=torch.float64, device=device).view(-1), ReduceOp.SUM)
        ratios = combine(torch.tensor(largest, dtype=torch.float64, device=device), ReduceOp.MAX).tolist()
        totals = summed.view(-1, 2).tolist()
        coefficients = {
            row: self._coefficient(row, ratios[row], *totals[row])
            for name in sorted(taking_part)
            for row in self._tensors.rows(name)
        }
        for slice_ in slices:
            with self.state(slice_, write=True) as state:
                rate = float(self.groups[slice_.group]["lr"])
                for row, _, part, _, direction in self._directions(slice_, state):
                    slice_.master[part].sub_(direction.mul_(rate * coefficients[row]))
                if slice_.low is not None:
                    slice_.low.copy_(slice_.master)
            done(slice_)

    def _coefficient(self, row: int, ratio: float, moment_squares: float, direction_squares: float) -> float:
        decays = float(self.groups[self._group_of[self._tensors.parameters[row]]].get("weight_decay", 0.0)) > 0
        share = min(1.0, (moment_squares / direction_squares) ** 0.5) if decays and direction_squares > 0 else 1.0
        return self._ratios.next(self._tensors.labels[row], ratio if ratio > 0 else 1.0, share)

    def _beta1(self, name: str) -> float:
        return float(self.groups[self._group_of[name]]["betas"][0])

    def _move_state(self, slice_: Slice, state: Mapping[str, Tensor], phase: Phase) -> None:
        """The averaged momentum replaces this slice's; the gradient that it stands for enters the fresh variance."""
        beta1, beta2 = (float(beta) for beta in self.groups[slice_.group]["betas"])
        for shard, here in phase.vector.pieces(slice_):
            if shard.name in slice_.idle:
                continue
            span = slice(shard.offset, shard.offset + shard.numel)
            momentum, fresh = state["exp_avg"][span], state[_FRESH][span]
            for part in chunks(here):
                gradient = (here[part] - momentum[part].mul_(beta1)).div_(1.0 - beta1)
                fresh[part].mul_(beta2).add_(gradient.square_().mul_(1.0 - beta2))
                momentum[part].copy_(here[part])

    def _directions(
        self, slice_: Slice, state: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, Shard, slice, Tensor, Tensor]]:
        """Cache-sized parts of tensors: (row, shard, place in the slice, m / (sqrt(v) + eps), direction with decay)."""
        settings = self.groups[slice_.group]
        decay, frozen = float(settings.get("weight_decay", 0.0)), self._frozen.counts
        assert frozen is not None
        moving = (one for one in slice_.shards if one.name not in slice_.idle)
        for shard, (row, start, stop) in ((one, part) for one in moving for part in self._tensors.parts(one)):
            counts = self._warm.participation.of(shard.name), frozen.of(shard.name)
            inv_c1, inv_sqrt_c2 = preconditioner(settings, *counts)
            for inside in chunks(slice_.master[start:stop]):
                part = slice(start + inside.start, start + inside.stop)
                v = state["exp_avg_sq"][part]
                bottom = square_root(v, out=torch.empty_like(v)).mul_(inv_sqrt_c2).add_(float(settings["eps"]))
                moment = (state["exp_avg"][part] * inv_c1).div_(bottom)
                yield row, shard, part, moment, moment + slice_.master[part] * decay if decay else moment.clone()

    def _largest_ratio(
        self, slice_: Slice, state: Mapping[str, Tensor], phase: Phase, shard: Shard, part: slice
    ) -> float:
        settings, frozen = self.groups[slice_.group], self._frozen.counts
        assert frozen is not None
        eps, roots = float(settings["eps"]), []
        for name, count in (("exp_avg_sq", frozen), (_FRESH, self._warm.participation)):
            v = state[name][part]
            correction = preconditioner(settings, 1, count.of(shard.name))[1]
            roots.append(square_root(v, out=torch.empty_like(v)).mul_(correction).add_(eps))
        ratio = roots[0].div_(roots[1])
        if phase.exchange.active is not None:
            start = shard.start + part.start - shard.offset
            ratio = ratio[phase.vector.view(shard.name, phase.exchange.active)[start : start + ratio.numel()]]
        return float(ratio.max()) if ratio.numel() else 0.0

    # ------------------------------------------------------------------------------------------------------ state
    @contextmanager
    def state(self, slice_: Slice, *, write: bool = False) -> Iterator[Mapping[str, Tensor]]:
        with self._warm.state(slice_, write=write) as state:
            if self._frozen.counts is None and self._part.phase is None:
                yield state
                return

            def make() -> State:
                return {_FRESH: settle(state["exp_avg_sq"])}

            with self._fresh.borrow(slice_.key, make, write=write) as fresh:
                yield {**state, **fresh}

    def state_dict(self) -> dict[str, Any]:
        own = {**self._frozen.state_dict(), **self._part.state_dict()}
        return {"rule": _NAME, **self._warm.participation.state_dict(), **own, "ratios": self._ratios.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also takes over a run of plain LAMB, as its warm-up."""
        if state.get("rule") not in ("lamb", _NAME):
            raise CheckpointError(
                f"The optimizer state was written by rule {state.get('rule')!r}, and {_NAME} continues from lamb and "
                f"{_NAME}. Configure the same optimizer, or load without optimizer state."
            )
        updates = read_updates(state, str(state["rule"]))
        self._leave()
        self._warm.participation.load(updates, state.get("missed", {}))
        self._frozen.load_state_dict(state)
        self._part.load_state_dict(state)
        self._ratios.load_state_dict(state.get("ratios", {}))

    def rank_state(self) -> dict[str, Tensor]:
        return self._part.rank_state()

    def load_rank_state(
        self, state: Mapping[str, Tensor], saved_ranks: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        self._part.load_rank_state(state, saved_ranks)

    def synchronize(self, slices: Sequence[Slice]) -> bool:
        return False

    def bytes(self) -> dict[str, int]:
        return self._part.bytes(self._warm.bytes(), self._fresh.bytes())

    def close(self) -> None:
        self._leave()
        self._warm.close()
