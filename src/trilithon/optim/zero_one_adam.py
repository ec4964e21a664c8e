"""0/1 Adam: one bit per element almost from the start, and no communication at all at most later steps.

Phase A: at some steps gradients are averaged in full precision and both moments are updated, which is Adam, bit for
bit, as long as every step is such a step. At all others the gradients are averaged in compressed form and only the
momentum moves. Phase B: every rank moves along its own momentum under the frozen variance, and adds up what it did,
u = sum of lr * m. When ranks communicate, the compressed mean of u is applied to the point where they last agreed:

    x = x_agreed - u / (sqrt(v) + eps);   m = u / (sum of lr);   u = 0

(Lu et al. 2023, arXiv:2202.06009, algorithm 1, with phase A in the form that averages gradients.) The point of
agreement is kept, not recomputed, so that all ranks hold the same bits after a round; weight decay acts on weights and
on that point alike, and never enters the momentum. Between rounds ranks differ: `synchronize` makes them one, with an
uncompressed mean of u. A compressed one would put residuals of whole rounds into an u of fewer steps, and dividing by
the smaller sum of rates would then blow up the momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trilithon.comm.sign import Sign
from trilithon.config.compressed import ZeroOneAdam as ZeroOneAdamConfig
from trilithon.contracts import ReduceOp, Slice, State, SyncMode
from trilithon.errors import CheckpointError, ProtocolError
from trilithon.kernels import adam_step, preconditioned_step
from trilithon.kernels.chunks import read_gradient_
from trilithon.optim.compressed_part import CompressedPart
from trilithon.optim.elementwise import Settings, read_updates
from trilithon.optim.link import Link
from trilithon.optim.participation import Participation, paired_runs
from trilithon.optim.phase import Compression, Phase, blend_, groups_by_name, preconditioner
from trilithon.optim.zero_one_policy import Policy, PolicySettings
from trilithon.tiers import ResidentStore, filled, settle

_NAME = "zero_one_adam"


class ZeroOneAdam:
    """`contracts.Update` for ranks that hold whole state. Groups as for Adam, and exp_avg_mask.

    policy: what was communicated so far, and what comes next. link: None where there are only full-precision steps.
    """

    continues = ("adamw",)  # rules whose state this one takes over
    resembles = ("adam",)  # the same state; but weight decay was part of the gradient

    def __init__(self, groups: Sequence[Settings], section: ZeroOneAdamConfig, link: Link | None) -> None:
        self.groups = groups
        self.policy = Policy(
            PolicySettings(
                section.var_freeze_step,
                section.var_update_scaler,
                section.local_step_scaler,
                section.local_step_clipper,
                section.full_precision_warmup,
            )
        )
        self._link, self._group_of = link, groups_by_name(groups)
        self._by = Compression(
            Sign(section.scale_norm),
            target="gradient",
            auto_mask=section.auto_mask,
            per_tensor_scaling=section.per_tensor_scaling,
        )
        self._part = CompressedPart(_NAME, link, groups, self._by)
        self._moments, self._agreed = ResidentStore(), ResidentStore()
        self._updates, self._refreshes = Participation(), Participation()  # of the first and the second moment
        self._phase_is_frozen = self._mask_is_old = False
        self._moved: dict[str, float] = {}  # by parameter: sum of rates since ranks last agreed

    def sync_mode(self, step: int) -> SyncMode:
        return SyncMode.MEAN if self.policy.full(step) else SyncMode.LOCAL

    @torch.no_grad()
    def apply(
        self,
        step: int,
        slices: Sequence[Slice],
        grad_scale: float,
        done: Callable[[Slice], None],
        combine: Callable[[Tensor, ReduceOp], Tensor],
    ) -> None:
        full = self.policy.full(step)
        self._updates.begin(slices)
        if full:
            self._refreshes.begin(slices)
            for slice_ in slices:
                self._adam(slice_, grad_scale)
            self.policy.did_full()
            self._mask_is_old = True
        else:
            phase = self._phase_for(step, slices)
            if self.policy.frozen(step):
                self._local_step(phase, slices, grad_scale)
                if self.policy.did_local():
                    self._agree(phase, slices, step)
            else:
                self._onebit_step(phase, slices, grad_scale, step)
                self.policy.did_onebit()
        for slice_ in slices:
            done(slice_)

    def _adam(self, slice_: Slice, grad_scale: float) -> None:
        settings = self.groups[slice_.group]
        with self.state(slice_, write=True) as state:
            for start, stop, first, second in paired_runs(slice_, self._updates, self._refreshes):
                span = slice(start, stop)
                adam_step(
                    slice_.master[span],
                    slice_.grad[span],
                    state["exp_avg"][span],
                    state["exp_avg_sq"][span],
                    None if slice_.low is None else slice_.low[span],
                    lr=float(settings["lr"]),
                    betas=(float(settings["betas"][0]), float(settings["betas"][1])),
                    eps=float(settings["eps"]),
                    weight_decay=float(settings.get("weight_decay", 0.0)),
                    decoupled=True,
                    step=first,
                    second_step=second,
                    bias_correction=bool(settings.get("bias_correction", True)),
                    grad_scale=grad_scale,
                )

    # ------------------------------------------------------------------------------------------- compressed steps
    def _phase_for(self, step: int, slices: Sequence[Slice]) -> Phase:
        """The exchange of this phase. Phase B sends another quantity than phase A, so it begins without residuals."""
        if self._link is None or not self._link.whole:
            raise ProtocolError(f"{_NAME} needs ranks that hold whole state; make it through initialize() at stage 0.")
        frozen = self.policy.frozen(step)
        if frozen != self._phase_is_frozen:
            self._part.forget()
        phase = self._part.phase
        if phase is None:
            phase = self._part.begin(slices, self.state)
            self._phase_is_frozen, self._mask_is_old = frozen, False
        if self._mask_is_old:  # the variance of some element may have become positive
            phase.mask(self._link, self.groups, self._by, slices, self.state)
            self._mask_is_old = False
        return phase

    def _onebit_step(self, phase: Phase, slices: Sequence[Slice], grad_scale: float, step: int) -> None:
        assert self._link is not None
        taking_part = set()
        for name, grad in self._link.gradients():
            if name in phase.vector:
                taking_part.add(name)
                read_gradient_(phase.vector.view(name), grad, grad_scale)
        phase.add_rest()
        phase.exchange.average(taking_part, step)
        for slice_ in slices:
            with self.state(slice_, write=True) as state:
                for shard, mean in phase.vector.pieces(slice_):
                    if shard.name not in slice_.idle:
                        span = slice(shard.offset, shard.offset + shard.numel)
                        blend_(state["exp_avg"][span], mean, self._beta1(slice_), 1.0)
                self._precondition(slice_, state)

    def _precondition(self, slice_: Slice, state: Mapping[str, Tensor]) -> None:
        settings = self.groups[slice_.group]
        lr = float(settings["lr"])
        for start, stop, updates, refreshes in paired_runs(slice_, self._updates, self._refreshes):
            span = slice(start, stop)
            inv_c1, inv_sqrt_c2 = preconditioner(settings, updates, refreshes)
            preconditioned_step(
                slice_.master[span],
                state["exp_avg"][span],
                state["exp_avg_sq"][span],
                None if slice_.low is None else slice_.low[span],
                keep=self._keep(slice_),
                step_size=lr * inv_c1,
                inv_sqrt_c2=inv_sqrt_c2,
                eps=float(settings["eps"]),
            )

    def _local_step(self, phase: Phase, slices: Sequence[Slice], grad_scale: float) -> None:
        """This rank's own step, in `u` (the vector) and in its weights."""
        if self.policy.since_sync == 0:
            phase.vector.flat.zero_()
            self._moved = {}
        for slice_ in slices:
            with self.state(slice_, write=True) as state, self._agreed_of(slice_) as agreed:
                if self.policy.since_sync == 0:
                    agreed.copy_(slice_.master)
                blend_active(state["exp_avg"], slice_, self._beta1(slice_), grad_scale)
            phase.drop_masked([slice_], self.state)
            with self.state(slice_, write=True) as state, self._agreed_of(slice_) as agreed:
                self._precondition(slice_, state)
                for shard, moved in phase.vector.pieces(slice_):
                    if shard.name in slice_.idle:
                        continue
                    span = slice(shard.offset, shard.offset + shard.numel)
                    inv_c1, _ = preconditioner(self.groups[slice_.group], self._updates.of(shard.name), 0)
                    rate = float(self.groups[slice_.group]["lr"]) * inv_c1
                    moved.add_(state["exp_avg"][span], alpha=rate)
                    self._moved[shard.name] = self._moved.get(shard.name, 0.0) + rate
                    agreed[span].mul_(self._keep(slice_))

    def _agree(self, phase: Phase, slices: Sequence[Slice], step: int, *, exactly: bool = False) -> None:
        """All ranks apply the mean of what each did, compressed or not, to the point where they last agreed."""
        moved = {name for name, rate in self._moved.items() if rate > 0}
        if exactly:
            phase.exchange.average_exactly(step)
        else:
            phase.add_rest()
            phase.exchange.average(moved, step)
        for slice_ in slices:
            resting = {shard.name for shard in slice_.shards} - moved
            with self.state(slice_, write=True) as state, self._agreed_of(slice_) as agreed:
                self._apply_mean(slice_, state, agreed, phase, resting)
        phase.vector.flat.zero_()
        self._moved = {}
        self.policy.did_sync()

    def _apply_mean(
        self, slice_: Slice, state: Mapping[str, Tensor], agreed: Tensor, phase: Phase, resting: set[str]
    ) -> None:
        settings = self.groups[slice_.group]
        for shard, mean in phase.vector.pieces(slice_):
            if shard.name not in resting:
                state["exp_avg"][shard.offset : shard.offset + shard.numel].copy_(mean)
        every = Slice(slice_.key, slice_.group, slice_.master, slice_.grad, slice_.low, slice_.shards)  # none idle
        for start, stop, updates, refreshes in paired_runs(every, self._updates, self._refreshes, resting):
            span = slice(start, stop)
            slice_.master[span].copy_(agreed[span])
            preconditioned_step(
                slice_.master[span],
                state["exp_avg"][span],
                state["exp_avg_sq"][span],
                None if slice_.low is None else slice_.low[span],
                keep=1.0,
                step_size=1.0,
                inv_sqrt_c2=preconditioner(settings, updates, refreshes)[1],
                eps=float(settings["eps"]),
            )
        for shard in slice_.shards:
            if shard.name not in resting:
                state["exp_avg"][shard.offset : shard.offset + shard.numel].div_(self._moved[shard.name])

    @torch.no_grad()
    def synchronize(self, slices: Sequence[Slice]) -> bool:
        if self.policy.since_sync == 0 or self._part.phase is None:
            return False
        self._agree(self._part.phase, slices, -1, exactly=True)
        return True

    def _beta1(self, slice_: Slice) -> float:
        return float(self.groups[slice_.group]["betas"][0])

    def _keep(self, slice_: Slice) -> float:
        settings = self.groups[slice_.group]
        return 1.0 - float(settings["lr"]) * float(settings.get("weight_decay", 0.0))

    # ------------------------------------------------------------------------------------------------------ state
    @contextmanager
    def state(self, slice_: Slice, *, write: bool = False) -> Iterator[Mapping[str, Tensor]]:
        def make() -> State:
            return {name: filled(slice_.master, 0.0) for name in ("exp_avg", "exp_avg_sq")}

        with self._moments.borrow(slice_.key, make, write=write) as state:
            yield {"master": slice_.master, **state}

    @contextmanager
    def _agreed_of(self, slice_: Slice) -> Iterator[Tensor]:
        """The weights at which all ranks last agreed, decayed since."""
        with self._agreed.borrow(slice_.key, lambda: {"agreed": settle(slice_.master)}) as state:
            yield state["agreed"]

    def state_dict(self) -> dict[str, Any]:
        if self.policy.since_sync:
            raise ProtocolError("ranks have moved on their own since they last agreed; call engine.drain() first")
        refreshes = self._refreshes.state_dict()
        own = {"refreshes": refreshes, "policy": self.policy.state_dict(), **self._part.state_dict()}
        return {"rule": _NAME, **self._updates.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also takes over a run of AdamW, in which every step refreshed the variance."""
        if state.get("rule") not in (_NAME, *self.continues, *self.resembles):
            raise CheckpointError(
                f"The optimizer state was written by rule {state.get('rule')!r}, and {_NAME} continues from adamw and "
                f"{_NAME}. Configure the same optimizer, or load without optimizer state."
            )
        updates = read_updates(state, str(state["rule"]))
        self._updates.load(updates, state.get("missed", {}))
        refreshes = state.get("refreshes", state)
        self._refreshes.load(int(refreshes["updates"]), refreshes.get("missed", {}))
        self.policy.load_state_dict(state.get("policy", {}))
        self._moved = {}
        self._phase_is_frozen = self.policy.frozen(updates)
        self._part.load_state_dict(state)

    def rank_state(self) -> dict[str, Tensor]:
        return self._part.rank_state()

    def load_rank_state(
        self, state: Mapping[str, Tensor], saved_ranks: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        self._part.load_rank_state(state, saved_ranks)

    def bytes(self) -> dict[str, int]:
        return self._part.bytes(self._moments.bytes(), self._agreed.bytes())

    def close(self) -> None:
        self._part.forget()
        self._moments.close()
        self._agreed.close()


def blend_active(momentum: Tensor, slice_: Slice, beta: float, grad_scale: float) -> None:
    """The gradients of the parameters that are not idle enter their momentum."""
    if not slice_.idle:
        blend_(momentum, slice_.grad, beta, grad_scale)
        return
    for shard in slice_.shards:
        if shard.name not in slice_.idle:
            span = slice(shard.offset, shard.offset + shard.numel)
            blend_(momentum[span], slice_.grad[span], beta, grad_scale)
