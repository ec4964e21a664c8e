"""ZeRO stages 0 to 3 as one mechanism: units, and three switches.

    stage   values whole between uses   gradients whole until the boundary   fp32 state whole
    0       yes                         yes                                  yes
    1       yes                         yes                                  no
    2       yes                         no                                   no
    3       no                          no                                   no

The arithmetic of a step is the same in all of them: contributions are summed over ranks in rank order in fp32, so fp32
results do not depend on stage, bucket size or overlap. (Rajbhandari et al. 2020, arXiv:1910.02054, section 5.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trilithon.config import ZeroConfig
from trilithon.contracts import ReduceOp, Slice, SyncMode, Tag
from trilithon.errors import ProtocolError, TierError
from trilithon.zero import grouping, planning, window
from trilithon.zero.agreement import Agreement, Settled
from trilithon.zero.averaged import AveragedGradients
from trilithon.zero.composite import Places, RankPlacement
from trilithon.zero.cutting import Cut
from trilithon.zero.gradients import UnitGradients
from trilithon.zero.grouping import UnitPlan
from trilithon.zero.held_gradient import HeldGradients, hide_all
from trilithon.zero.holding import Holding
from trilithon.zero.init import built_values
from trilithon.zero.joining import Joining
from trilithon.zero.layout import FlatLayout
from trilithon.zero.local import LocalGradients
from trilithon.zero.masters import Masters, Placement
from trilithon.zero.materialize import initial_values, refuse_unready
from trilithon.zero.publishing import Publishing
from trilithon.zero.reduction import ReductionQueue
from trilithon.zero.residency import in_backward
from trilithon.zero.resting import Opened, OpenStores, Resting
from trilithon.zero.sharded_parameter import forget_owner, set_owner
from trilithon.zero.terms import Communicators, Precisions
from trilithon.zero.unit import Unit
from trilithon.zero.whole import WholeTensors

T = TypeVar("T")
_RUNNING: list[ZeroSharding] = []  # whose backward autograd is executing; innermost last


class ZeroSharding:
    """Implements `contracts.Sharding` for the parameters of one model, on one data-parallel group or on several.

    group_of: parameter -> optimizer group, or FROZEN. placements: by id of the parameters that live on other ranks than
    those of the data axis (see `composite`). Takes the model's parameters over at once, unit by unit: the memory needed
    beyond the final state is one unit in fp32.
    """

    def __init__(  # noqa: PLR0917 (made once, by engine.build)
        self, model: nn.Module, group_of: Callable[[nn.Parameter], int], settings: ZeroConfig, comm: Communicators,
        precisions: Precisions, device: torch.device, placement: Placement | None = None,
        open_stores: OpenStores | None = None, placements: Mapping[int, RankPlacement] | None = None,
    ) -> None:  # fmt: skip
        """placement: where masters rest; None on the device. open_stores: makes those for values and gradients that
        rest elsewhere, from what the units will need; it is called once, before parameters are taken over."""
        cut = comm.control.world_size > 1 or open_stores is not None
        self.stage = settings.stage if cut else min(settings.stage, 1)
        self._comm, self._precisions, self._device = comm, precisions, device
        self._step, self._micro, self._window_open = -1, -1, False
        self._deferred = self._abandoned = False
        self._sync = SyncMode.MEAN
        self._places = Places(comm.control, comm.gather, comm.reduce, placements or {})
        self.entries = self._places.put(list(grouping.entries_of(model, group_of, precisions.low)))
        self._joining = Joining(self.entries)
        for entry in self.entries:
            refuse_unready(entry.name, entry.param)
        self._frozen = [entry for entry in self.entries if not entry.param.requires_grad]
        trained = sum(entry.param.numel() for entry in self.entries if entry.trainable)
        self._masters = Masters(placement, trained // (self.world_size if self.stage else 1))
        found = planning.plans(model, self.entries, self.stage, settings, self._places.alone)
        plans = [(plan, planning.layout_of(plan, self._places.of(plan.entries[0]).world_size)) for plan in found]
        sizes = [planning.size_of(plan, layout, precisions.accumulate) for plan, layout in plans if not plan.whole]
        self._resting = open_stores(sizes) if open_stores is not None else Resting()
        self._failure: TierError | None = None  # of what rests, when it was last used
        self.gives_back = True  # whether the values are there to be given back; the same on all ranks
        self._module_of_unit: dict[Unit, str] = {}
        self.units = [self._make_unit(plan, layout, index) for index, (plan, layout) in enumerate(plans)]
        self._replicate_frozen()
        trainable = [unit for unit in self.units if unit.trainable]
        self._gradients = [self._make_gradients(unit) for unit in trainable]
        alike, may_block = comm.alike or comm.control, self.stage < 3
        self._queue = ReductionQueue(self._gradients, alike, overlap=settings.overlap, may_block=may_block)
        self._residency = None
        if self.stage == 3:
            group = comm.control if self._places.several else comm.gather
            fallible = self._resting.fallible
            self._residency = planning.gather_on_use(model, self._module_of_unit, settings, group, fallible=fallible)
        own = [field.name for unit in trainable for field in unit.layout.fields]
        self._every = planning.every_name(own, comm.control) if comm.alike is not None else own
        self._agree = Agreement(comm.control, device, self._joining.plain, self._every if comm.alike else None)
        self._alike = self._agree if comm.alike is None else Agreement(comm.alike, device, self._joining.plain)
        self.local = LocalGradients(self._gradients, self._agree, self.world_size)
        self._averaged = AveragedGradients(
            self._gradients, self._agree, self._queue, self._places,
            lambda what: self.raise_together(self._rest_failure(), what), self._alike,
        )  # fmt: skip
        self.before_hold: Callable[[], None] = lambda: None  # what has to happen before values are read or rewritten
        self._fallible = self._resting.fallible or (placement is not None and placement.fallible)
        self._holding = Holding(
            self.units, self._outside, comm.control, self._residency, self._alike.any_rank, self._take_over,
            self._places.writer_of,
        )  # fmt: skip
        for entry in self.entries:
            set_owner(entry.param, self, keep=False)
        rests = self._resting.values is not None or self._resting.gradients is not None
        self._opened = Opened(self._gradients) if rests else None
        self._cut = Cut.of(self._gradients, self._masters, self._opened)
        self._places.count(self._cut.of_unit, self.units, whole=self.stage == 0)
        self._whole = WholeTensors(self.units, self._outside, self._joining, self._places, self.together)
        self._publishing = Publishing(trainable, self._cut.keys_of)
        self._hooks: list[RemovableHandle] = []
        for index, gradients in enumerate(self._gradients):
            for position, param in enumerate(gradients.unit.params):
                self._hooks.append(param.register_post_accumulate_grad_hook(self._arrival(index, position)))
        self.held_gradients = HeldGradients(
            [(f.name, p) for g in self._gradients for f, p in zip(g.unit.layout.fields, g.unit.params, strict=True)]
        )

    # ---------------------------------------------------------------------------------------------- construction
    def _make_unit(self, plan: UnitPlan, layout: FlatLayout, index: int) -> Unit:
        entries, first = plan.entries, plan.entries[0]
        replicas = self._places.of(first)
        unit = Unit(
            index,
            plan.name,
            [entry.param for entry in entries],
            layout,
            comm=replicas.gather,
            dtype=first.dtype,
            master_dtype=torch.float64 if first.dtype == torch.float64 else torch.float32,
            trainable=first.trainable,
            whole_state=self.stage == 0,
            whole_values=plan.whole,
            rest=None if plan.whole else self._resting.values,
        )
        self._module_of_unit[unit] = plan.module
        self._places.of_unit[unit] = replicas
        self._masters.adopt(unit, initial_values(unit, replicas.gather, self._device))
        return unit

    def _make_gradients(self, unit: Unit) -> UnitGradients:
        replicas = self._places.of_unit[unit]
        return UnitGradients(
            unit,
            reducer=replicas.reduce,
            gatherer=replicas.gather,
            divisor=replicas.divisor,
            keep_full=self.stage < 2,
            wire=self._precisions.wire or unit.dtype,
            accumulate=self._precisions.accumulate or unit.dtype,
            rest=None if unit.whole_values else self._resting.gradients,
        )

    def _replicate_frozen(self) -> None:
        """Parameters outside every unit: cast, moved, and the same on all ranks."""
        inside = {id(param) for unit in self.units for param in unit.params}
        self._outside = [entry for entry in self.entries if id(entry.param) not in inside]
        for entry in self._outside:
            built = built_values(entry.param)
            initial = (entry.param.data if built is None else built).to(self._device, entry.dtype).contiguous()
            group, _ = self._places.writer_of(entry.param, 0)
            group.broadcast(initial, 0, Tag("initial values", (entry.name,))).wait()
            entry.param.data = initial

    # ------------------------------------------------------------------------------------------------- one step
    @property
    def world_size(self) -> int:
        return self._comm.control.world_size

    @property
    def rank(self) -> int:
        return self._comm.control.rank

    def begin_step(self, sync: SyncMode, step: int) -> None:
        if sync is SyncMode.LOCAL and self.stage > 1:
            raise ProtocolError(
                f"an update rule that communicates itself needs whole gradients on every rank, and zero.stage="
                f"{self.stage} cuts them during backward. Use zero.stage 0 or 1."
            )
        self._refuse_unfrozen()
        self._sync = sync
        self._step = self._agree.step = self._alike.step = step
        self._micro = -1
        if self._residency is not None:
            self._residency.begin_step(step, 0)

    def _refuse_unfrozen(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # reads of sharded parameters would each go through Python
            names = [entry.name for entry in self._frozen if entry.param.requires_grad]
        if names:
            raise ProtocolError(
                f"{names[:4]} were frozen when the engine was made and now ask for gradients, for which there is no "
                "master copy or optimizer state. Close the engine and make another with trilithon.initialize()."
            )

    def micro_step(self, last: bool) -> None:
        self._micro += 1
        self._deferred = (not last or self._sync is SyncMode.LOCAL) and self.stage < 2
        self._begin_backward(reduce=not self._deferred)

    def micro_step_without_sync(self) -> None:
        """A backward whose gradients stay on this rank (`no_sync`), at any stage."""
        self._micro += 1
        self._deferred = True
        self._begin_backward(reduce=False)

    def reduce_window(self) -> None:
        """Collective: reduce what backwards without sync have left on this rank, all of it at once and in order."""
        self.micro_step(last=True)
        self.finish_backward()

    def _begin_backward(self, *, reduce: bool) -> None:
        if self._abandoned:  # only now: while the exception was on its way, waiting for other ranks would hide it
            self._abandoned = False
            self._queue.abandon()
            self.drop_gradients()
        hide_all()
        self._window_open = True
        _RUNNING.append(self)
        self._queue.begin_backward(reduce=reduce, step=self._step, micro_step=self._micro)
        if self._residency is not None:
            self._residency.begin_step(self._step, self._micro)
        else:
            self.held_gradients.offer(place for gradients in self._gradients for place in gradients.places())

    def _arrival(self, index: int, position: int) -> Callable[[nn.Parameter], None]:
        reference = weakref.ref(self)  # the collector does not see into hooks of parameters, so they hold nothing

        def hook(param: nn.Parameter) -> None:
            sharding = reference()
            if sharding is not None and param.grad is not None:
                grad, param.grad = param.grad, None
                sharding._arrive(index, position, grad)

        return hook

    def _arrive(self, index: int, position: int, grad: Tensor) -> None:
        gradients = self._gradients[index]
        if not _RUNNING:
            raise ProtocolError(
                f"a gradient for '{gradients.unit.layout.fields[position].name}' arrived outside engine.backward(). "
                "Call engine.backward(loss) instead of loss.backward(): it scales the loss and averages over ranks."
            )
        if _RUNNING[-1] is not self:  # another engine's loss ran through this model; its gradient is not ours to keep
            return
        if grad.is_sparse:
            grad = grad.to_dense()
        if gradients.arrive(position, grad, self._deferred):
            del grad
            self._queue.complete(index)

    def finish_backward(self) -> None:
        if self in _RUNNING:
            _RUNNING.remove(self)
        self._queue.finish_backward()
        if self._residency is not None:
            self._residency.finish_backward()
        self.held_gradients.show()

    def abandon_backward(self) -> None:
        """An exception left this backward half done: its window is forgotten when the next one begins."""
        if self in _RUNNING:
            _RUNNING.remove(self)
        self._abandoned, self._window_open = True, False
        self.held_gradients.hide()
        if self._residency is not None:
            self._residency.finish_backward()

    def settle(self, extra: Sequence[float] = ()) -> Settled:
        """Agree on the gradient of this window. Collective; may be called again with the same result."""
        settled = (self.local if self.keeps_local else self._averaged).settle(extra, self._step, self._micro)
        self._cut.hand_out_gradients()
        return settled

    def _rest_failure(self) -> TierError | None:
        """What has failed on this rank since the engine was made; nothing that follows from it may count."""
        found = [self._failure, self._resting.failure(), *(gradients.failure for gradients in self._gradients)]
        if self._residency is not None:
            found.append(self._residency.failure())
        return next((error for error in found if error is not None), None)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Collective: one small value from every rank, in rank order."""
        return self._agree.exchange(value, what)

    def sum(self, numbers: Sequence[float], what: str) -> list[float]:
        """Collective: a few numbers, summed over ranks."""
        return self._agree.sum(numbers, what)

    def non_finite_here(self) -> list[str]:
        """Parameters whose gradient was not finite on this rank before it was reduced."""
        return [name for gradients in self._gradients for name in gradients.find_non_finite()]

    def slices(self) -> Sequence[Slice]:
        return self._cut.slices

    @property
    def disjoint(self) -> bool:
        """What ranks compute over their slices adds up (each divided by its `copies`); else all hold the same ones."""
        return self.stage > 0 or self._places.several

    def combine(self, local: Tensor, op: ReduceOp) -> Tensor:
        if self.disjoint:  # else every rank has computed over all slices already
            self._comm.control.all_reduce(local, Tag("combine", step=self._step), op).wait()
        return local

    def publish(self, slice_: Slice | None = None) -> None:
        """With a slice, that one may be sent on already; without, all are, and have arrived when this returns."""
        if slice_ is not None:
            self._publishing.updated(slice_, self._step)
            return
        self._publishing.finish(self._step)
        self._close_opened()
        if self._residency is not None:
            self._residency.free_all()

    def _close_opened(self) -> None:
        try:
            if self._opened is not None:
                self._opened.close()
        except TierError as error:  # told by the next agreement
            self._failure = self._failure or error

    def drop_gradients(self) -> None:
        self.held_gradients.hide()
        self._close_opened()
        for gradients in self._gradients:
            gradients.drop()
        self._window_open = False

    # ---------------------------------------------------------------------------------------------- checkpoints
    @property
    def outside(self) -> Sequence[grouping.Entry]:
        """Frozen parameters that are in no unit: whole, and equal on all ranks."""
        return self._outside

    @property
    def gradients(self) -> Sequence[UnitGradients]:
        return self._gradients

    def reopen_window(self, step: int, backwards: int, described: Mapping[str, Any]) -> None:
        """Stand where `backwards` micro-steps of a window have run; their gradients are filled in by the caller."""
        self._abandoned, self._window_open, self._micro = False, True, backwards - 1
        self._step = self._agree.step = self._alike.step = step
        window.reopen(self._gradients, described)

    def forget_window(self) -> None:
        """No micro-step has run since the last update, whatever has."""
        self._queue.abandon()
        self._abandoned = False
        self.drop_gradients()

    # -------------------------------------------------------------------------------------------- whole tensors
    @property
    def names(self) -> list[str]:
        return self._joining.names

    @property
    def trainable_names(self) -> list[str]:
        """Of all ranks, in the same order on each of them."""
        return self._joining.plain(self._every)

    @property
    def keeps_local(self) -> bool:
        """This window began with SyncMode.LOCAL: its gradients are `local`."""
        return self._sync is SyncMode.LOCAL

    def full(self, kind: str, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Collective. Views of one unit's gathered values at a time: clone what should outlive the next item."""
        if kind == "grad":
            if not self._window_open:
                raise ProtocolError("no gradient is here: ask between the last engine.backward() and engine.step()")
            self.settle()
            if self.keeps_local:
                yield from self.full_of(lambda unit: self.local.mean(unit, self._step), names)
                return
            by_unit = {g.unit.index: g for g in self._gradients}
            yield from self.full_of(lambda u: by_unit[u.index].read_result() if u.index in by_unit else None, names)
            return
        if kind not in ("param", "master"):
            raise ProtocolError(f"unknown kind '{kind}'; there are 'param', 'master' and 'grad'")
        master = kind == "master"
        own_of = lambda unit: self._masters.of(unit) if master and unit.trainable else unit.read_values()  # noqa: E731
        yield from self.full_of(own_of, names)
        yield from self._whole.outside(names)

    def full_of(self, own_of: Callable[[Unit], Tensor | None], names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Collective. own_of(unit): this rank's [own] part of something laid out as the unit, None to leave it out."""
        yield from self._whole.of(own_of, names, self._step)

    def raise_together(self, error: TierError | None, what: str, agree: Agreement | None = None) -> None:
        """If this rank or another one has an error, all raise it. Collective if state is on disk, else nothing."""
        error = error or self._failure
        try:
            if self._fallible:
                (agree or self._agree).raise_together(error, what)
            elif error is not None:
                raise error
        except TierError:
            self.gives_back = False
            raise

    def together(self, action: Callable[[], T], what: str) -> T:
        """Do what may fail on one rank alone. Collective if state is on disk; then TierError is raised on all ranks."""
        if not self._fallible:
            return action()
        found, error = None, None
        try:
            found = action()
        except TierError as caught:
            error = caught
        self.raise_together(error, what, self._alike)
        return cast(T, found)

    def _take_over(self, places: Sequence[tuple[Unit, int]]) -> None:
        def all_of_them() -> None:
            for unit, index in places:
                self._masters.take_over(unit, index)

        self.together(all_of_them, "gathered(modify=)")

    def slices_of(self, unit: Unit) -> list[tuple[Slice, int, int]]:
        """(slice, start, stop) in the unit's owned range."""
        return self._cut.of_unit(unit)

    def make_whole(self, params: Sequence[nn.Parameter], use: str) -> None:
        assert self._residency is not None
        self._residency.make_whole(params, use)

    def gathered(self, names: Sequence[str], modify: int | None) -> AbstractContextManager[Mapping[str, Tensor]]:
        wanted = set(names)
        return self.hold([entry.param for entry in self.entries if entry.name in wanted], modify)

    def hold(self, params: Sequence[nn.Parameter], modify: int | None) -> AbstractContextManager[Mapping[str, Tensor]]:
        self.before_hold()
        return self._holding.hold(params, modify, self._step)

    def begin_uneven(self) -> None:
        if self._residency is not None:
            self._residency.begin_uneven()

    def end_uneven(self) -> None:
        if self._residency is not None:
            self._residency.end_uneven()

    def abandon_uneven(self) -> None:
        """An exception left the context: the other ranks are not served any more."""
        if self._residency is not None:
            self._residency.abandon_uneven()

    # --------------------------------------------------------------------------------------------------- the end
    def bytes(self) -> dict[str, int]:
        """Bytes on this rank by category; `in_flight` is what exists only around its use."""
        outside = sum(e.param.numel() * e.param.element_size() for e in self._outside)
        return {
            "parameters": sum(unit.values_bytes for unit in self.units) + outside,
            "gradients": sum(gradients.bytes() for gradients in self._gradients),
            "master": sum(self._masters.bytes(unit) for unit in self.units),
            "in_flight": sum(u.flat.untyped_storage().nbytes() for u in self.units if not u.whole_values),
        }

    def resting_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of values and gradients that rest off the device: {tier: {category: bytes}}."""
        return self._resting.bytes()

    def close(self, *, give_back: bool = True) -> None:
        """Collective at stage 3 with give_back, which makes the model ordinary again; without, its values are gone."""
        self.held_gradients.hide()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self.gives_back = give_back = give_back and self.gives_back
        if self._residency is not None:
            self.gives_back = give_back = self._residency.close(give_back=give_back)
        self._queue.close()
        for unit in self.units:
            if give_back or unit.whole_values:
                unit.release()
            else:
                unit.forget()
        self._resting.close()
        for entry in self.entries:
            forget_owner(entry.param)


__all__ = ["Communicators", "Precisions", "Settled", "ZeroSharding", "in_backward"]
