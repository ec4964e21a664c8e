"""APMSqueeze: Adam while the variance settles, then momentum that ranks average in compressed form.

Warm-up is Adam, bit for bit. Then the second moment is frozen and becomes a fixed preconditioner, under which a step is
linear in the gradient, so that what compression loses can be sent later:

    m_i = m + (g_i - m) * (1 - beta1)            with this rank's own gradient
    m   = compressed mean over ranks of m_i      the same on every rank
    p   = p * (1 - lr * decay) - lr * (m / c1) / (sqrt(v / c2) + eps)

(Tang et al. 2020, arXiv:2008.11343, algorithm 1.) Three departures: weight decay is decoupled; the bias corrections go
on where the warm-up left them, c1 with the step and c2 frozen with v, so that nothing jumps; several parameter groups
travel in one vector. With target "gradient" the gradients are averaged in compressed form instead, and m is built from
their mean, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from trilithon.contracts import ReduceOp, Slice, SyncMode, Tag
from trilithon.errors import CheckpointError
from trilithon.kernels import preconditioned_step
from trilithon.kernels.chunks import read_gradient_
from trilithon.optim.adam import AdamRule
from trilithon.optim.compressed_part import CompressedPart, FrozenVariance
from trilithon.optim.elementwise import Elementwise, Settings, read_updates
from trilithon.optim.freeze import Freeze
from trilithon.optim.fused import Fused
from trilithon.optim.link import Link
from trilithon.optim.participation import paired_runs
from trilithon.optim.phase import Compression, Phase, blend_, device_of, groups_by_name, preconditioner


class ApmSqueeze:
    """`contracts.Update`. Each group holds lr, betas, eps, and may hold weight_decay, bias_correction, exp_avg_mask
    and non_freeze (this group's gradients are averaged uncompressed and its variance lives on).

    link: None where there is only a warm-up (tests of a rule by itself). name: what a checkpoint calls it.
    """

    continues = ("adamw", "onebit_adam", "apmsqueeze")  # rules whose state this one takes over
    resembles = ("adam",)  # the same state; but weight decay was part of the gradient

    def __init__(
        self, groups: Sequence[Settings], freeze: Freeze, compression: Compression, link: Link | None,
        name: str = "apmsqueeze",
    ) -> None:  # fmt: skip
        self.groups, self.name = groups, name
        self._compression, self._link = compression, link
        self._warm = Elementwise(AdamRule(decoupled=True), groups)
        self._group_of = groups_by_name(groups)
        self._uncompressed: Fused | None = None  # gradients of groups that are not frozen
        self._frozen = FrozenVariance(freeze, groups, device_of(link))
        self._part = CompressedPart(name, link, groups, compression, self._live)

    def sync_mode(self, step: int) -> SyncMode:
        return SyncMode.LOCAL if self._frozen.over(step) else SyncMode.MEAN

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
            self._compressed_step(step, slices, grad_scale, done)
            return
        self._leave()
        self._warm.apply(step, slices, grad_scale, done, combine)
        self._frozen.observe(step, slices, self.state, combine)

    # --------------------------------------------------------------------------------------------- the two phases
    def _leave(self) -> None:
        """The warm-up goes on (it was lengthened on resume): what was lost in compression is forgotten."""
        self._uncompressed = None
        self._frozen.thaw()
        self._part.forget()

    def _live(self) -> set[str]:
        """Parameters whose gradients are averaged uncompressed."""
        return {name for name, group in self._group_of.items() if self.groups[group].get("non_freeze")}

    def _enter(self, slices: Sequence[Slice]) -> Phase:
        """From here on the variance is fixed. Collective; also after a resume, with what was saved."""
        phase, live = self._part.begin(slices, self.state), self._live()
        if live and self._link is not None:
            self._uncompressed = Fused(self._link.shapes, live, None, self._link.device)
        self._frozen.freeze(self._warm.participation)
        return phase

    def _compressed_step(
        self, step: int, slices: Sequence[Slice], grad_scale: float, done: Callable[[Slice], None]
    ) -> None:
        phase = self._part.phase or self._enter(slices)
        self._warm.participation.begin(slices)
        taking_part = self._fill(phase.vector, grad_scale)
        phase.add_rest()
        phase.exchange.average(taking_part, step)
        self._average_uncompressed(step)
        for slice_ in slices:
            if self.groups[slice_.group].get("non_freeze"):
                self._hand_out(slice_)
                self._warm.move(slice_, grad_scale)
            else:
                self._move(slice_, phase.vector)
            done(slice_)

    def _fill(self, vector: Fused, grad_scale: float) -> set[str]:
        """What this rank sends, in place; the names of the parameters that take part."""
        assert self._link is not None
        taking_part = set()
        for name, grad in self._link.gradients():
            if name in vector:
                taking_part.add(name)
                view = vector.view(name)
                if self._compression.target == "gradient":
                    read_gradient_(view, grad, grad_scale)
                else:
                    blend_(view, grad, float(self.groups[self._group_of[name]]["betas"][0]), grad_scale)
            elif self._uncompressed is not None and name in self._uncompressed:
                self._uncompressed.view(name).copy_(grad)
        return taking_part

    def _average_uncompressed(self, step: int) -> None:
        if self._uncompressed is not None and self._link is not None:
            flat, group = self._uncompressed.flat, self._link.group
            group.all_reduce(flat, Tag("gradients of groups that are not frozen", step=step)).wait()
            flat.div_(group.world_size)

    def _hand_out(self, slice_: Slice) -> None:
        assert self._uncompressed is not None
        for shard, mean in self._uncompressed.pieces(slice_):
            slice_.grad[shard.offset : shard.offset + shard.numel].copy_(mean)

    def _move(self, slice_: Slice, vector: Fused) -> None:
        settings = self.groups[slice_.group]
        lr, beta1 = float(settings["lr"]), float(settings["betas"][0])
        with self.state(slice_, write=True) as state:
            momentum = state["exp_avg"]
            for shard, here in vector.pieces(slice_):
                if shard.name in slice_.idle:
                    continue
                mine = momentum[shard.offset : shard.offset + shard.numel]
                if self._compression.target == "gradient":
                    blend_(mine, here, beta1, 1.0)
                else:
                    mine.copy_(here)
            assert self._frozen.counts is not None
            for start, stop, updates, frozen in paired_runs(slice_, self._warm.participation, self._frozen.counts):
                span = slice(start, stop)
                inv_c1, inv_sqrt_c2 = preconditioner(settings, updates, frozen)
                preconditioned_step(
                    slice_.master[span],
                    momentum[span],
                    state["exp_avg_sq"][span],
                    None if slice_.low is None else slice_.low[span],
                    keep=1.0 - lr * float(settings.get("weight_decay", 0.0)),
                    step_size=lr * inv_c1,
                    inv_sqrt_c2=inv_sqrt_c2,
                    eps=float(settings["eps"]),
                )

    # ------------------------------------------------------------------------------------------------------ state
    def state(self, slice_: Slice, *, write: bool = False) -> AbstractContextManager[Mapping[str, Tensor]]:
        return self._warm.state(slice_, write=write)

    def state_dict(self) -> dict[str, Any]:
        own = {**self._frozen.state_dict(), **self._part.state_dict()}
        return {"rule": self.name, **self._warm.participation.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also takes over a run of AdamW, as its warm-up, and a run of another rule of this family."""
        if state.get("rule") not in (*self.continues, *self.resembles):
            raise CheckpointError(
                f"The optimizer state was written by rule {state.get('rule')!r}, and {self.name} continues from adamw, "
                "onebit_adam and apmsqueeze. Configure the same optimizer, or load without optimizer state."
            )
        updates = read_updates(state, str(state["rule"]))
        self._leave()
        self._warm.participation.load(updates, state.get("missed", {}))
        self._frozen.load_state_dict(state)
        self._part.load_state_dict(state)

    def rank_state(self) -> dict[str, Tensor]:
        return self._part.rank_state()

    def load_rank_state(
        self, state: Mapping[str, Tensor], saved_ranks: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        self._part.load_rank_state(state, saved_ranks)

    def synchronize(self, slices: Sequence[Slice]) -> bool:
        return False

    def bytes(self) -> dict[str, int]:
        return self._part.bytes(self._warm.bytes())

    def close(self) -> None:
        self._leave()
        self._warm.close()
