"""The gradient of one unit: collected as autograd produces it, reduced, and handed over as the part this rank owns.

Reduction is linear and safe: whatever has arrived when a unit is reduced is reduced, what is missing counts as zero,
and what comes later is reduced as well and added. So modules used twice, re-entrant recomputation and several
backwards before one step give what plain autograd gives. (The third answer of a ZeRO stage, are gradients whole until
the boundary, is `keep_full`; Rajbhandari et al. 2020, arXiv:1910.02054, section 5.2.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from trilithon.contracts import Collectives, Handle, StateStore, Tag
from trilithon.errors import TierError
from trilithon.kernels import count_non_finite, sum_of_squares
from trilithon.tiers import off_device, resident
from trilithon.zero.unit import Unit


class UnitGradients:
    """Collects, reduces and holds the gradient of one trainable unit.

    reducer, gatherer: groups for the two directions. divisor: of the sum over `reducer`; None for its size. keep_full:
    contributions stay local until the boundary (stages 0 and 1). wire: dtype on the network. accumulate: dtype of sums
    over micro-steps and of the result. rest: where the result is kept from one reduction to the next, and until the
    update; None: in `result`.
    """

    def __init__(
        self, unit: Unit, *, reducer: Collectives, gatherer: Collectives, keep_full: bool, wire: torch.dtype,
        accumulate: torch.dtype, rest: StateStore | None = None, divisor: int | None = None,
    ) -> None:  # fmt: skip
        self.unit, self._reducer, self._gatherer = unit, reducer, gatherer
        self._divisor = divisor if divisor is not None else reducer.world_size
        self._in_place = keep_full or reducer.world_size == 1
        self._wire, self._accumulate = wire, accumulate
        self._whole_result = unit.own == (0, unit.layout.padded)
        count = len(unit.params)
        self.expected = [1] * count  # arrivals per parameter in one backward, learned from the one before
        self.arrivals = [0] * count  # in this backward
        self._missing = count  # arrivals still expected in this backward
        self.used = [False] * count  # in this accumulation window
        self.result: Tensor | None = None  # [own] mean over ranks of what has been reduced in this window
        self.local: Tensor | None = None  # [padded] this rank's own gradient of the window, when nobody reduces it
        self._full: Tensor | None = None  # [padded] contributions that no reduction has taken yet
        self._filled = [False] * count
        self._parts: tuple[Tensor | None, list[Tensor]] = None, []  # of the buffer that was used last, by parameter
        self._pending: list[Handle] = []
        self._spare: Tensor | None = None  # a buffer of the window before, to be used again
        self._owner_of_result: Tensor | None = None
        self.non_finite: list[str] = []  # parameters whose gradient was not finite here, in this window
        self._rest = rest
        self.at_rest = False  # the result is in `rest`, and not in memory
        self.failure: TierError | None = None
        self._squares = 0.0  # of the result at rest

    # ----------------------------------------------------------------------------------------------- collecting
    def begin_backward(self) -> None:
        self.arrivals = [0] * len(self.arrivals)
        self._missing = sum(self.expected)

    def end_backward(self) -> None:
        self.expected = list(self.arrivals)

    def places(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Where autograd may add to what is here: (parameter, its sum so far), in the type of its gradient."""
        if self._full is None or self._full.dtype != self.unit.dtype or self._parts[0] is not self._full:
            return
        for param, part, filled in zip(self.unit.params, self._parts[1], self._filled, strict=True):
            if filled:
                yield param, part

    def arrive(self, index: int, grad: Tensor, deferred: bool) -> bool:
        """Take the gradient of parameter `index`; True when all that is expected in this backward has come.

        grad: or the place of this parameter (see `places`), to which autograd has added it. deferred: it will stay
        here over several backwards, so it is summed in the accumulation type.
        """
        full = self._full if self._full is not None else self._fresh(deferred)
        if self._parts[0] is not full:
            fields = self.unit.layout.fields
            self._parts = full, [full[field.start : field.stop].view(field.shape) for field in fields]
        part = self._parts[1][index]
        if not self._filled[index]:
            part.copy_(grad)
            self._filled[index] = True
        elif grad is not part:
            part.add_(grad)
        self.used[index] = True
        self.arrivals[index] += 1
        self._missing -= self.arrivals[index] <= self.expected[index]
        return self.complete()

    def complete(self) -> bool:
        return self._missing == 0

    @property
    def dirty(self) -> bool:
        """Contributions are here that no reduction has taken."""
        return self._full is not None

    # ---------------------------------------------------------------------------------------------- checkpoints
    @property
    def rank(self) -> int:
        return self._reducer.rank

    @property
    def dtype(self) -> torch.dtype:
        """Of sums over micro-steps."""
        return self._accumulate

    @property
    def contributions(self) -> Tensor | None:
        """[padded] of this rank alone, in the parameters that are `filled`; None when all has been reduced."""
        return self._full

    @property
    def filled(self) -> list[bool]:
        return self._filled

    def restore_result(self) -> None:
        """Zeros, to be filled with the mean over ranks of what was reduced before; later reductions add to it."""
        low, high = self.unit.layout.owned(self.rank)
        numel = self.unit.layout.padded if self._in_place else high - low
        owner = resident(numel, self._accumulate, self.unit.flat.device)
        self._owner_of_result = owner
        self.result = owner[low:high] if self._in_place and not self._whole_result else owner

    def restore_contributions(self, filled: list[bool]) -> None:
        """Zeros, to be filled with what this rank had collected."""
        full = self._fresh(deferred=True)
        self._filled = filled
        full.zero_()

    def _fresh(self, deferred: bool) -> Tensor:
        dtype = self._accumulate if deferred or self._in_place else self.unit.dtype
        if self._in_place and self._spare is not None and self._spare.dtype == dtype:
            full, self._spare = self._spare, None
        else:
            padded, device = self.unit.layout.padded, self.unit.flat.device
            stays = self._in_place and self._rest is None  # for the run, else for this backward
            make = resident if stays else torch.empty
            full = make(padded, dtype=dtype, device=device)
            for start, stop in self.unit.layout.gaps():
                full[start:stop].zero_()
        self._full, self._filled = full, [False] * len(self._filled)
        return full

    # ------------------------------------------------------------------------------------------------- reducing
    def launch(self, tag: Tag) -> None:
        """Reduce what is here, missing parts as zero; the sum lands in `result` when `land` is called."""
        full = self._complete()
        if full.device.type == "cpu" and not self._is_own_result:  # elsewhere asking would stall the stream
            self.non_finite += self._names_of_non_finite(full)
        self._full = None
        if not self._in_place or self.reduced:  # the buffer goes; else it becomes the result
            self._parts = None, []
        wire = full if full.dtype == self._wire else full.to(self._wire)
        low, high = self.unit.layout.owned(self._reducer.rank)
        if self.at_rest:
            self._wake(high - low, full)
        if self.result is None:
            if self._in_place:
                self._owner_of_result = full
                self.result = full if self._whole_result else full[low:high]
            else:
                self._owner_of_result = self.result = self._result_buffer(high - low, full)
            out, accumulate = (self.result[low:high] if self._whole_result else self.result), False
        else:
            out, accumulate = (self.result[low:high] if self._whole_result else self.result), True
        handle = self._reducer.reduce_scatter(wire, out, tag, scale=1.0 / self._divisor, accumulate=accumulate)
        self._pending.append(handle)

    def _complete(self) -> Tensor:
        """[padded] what is here, with zeros for what is missing."""
        full = self._full if self._full is not None else self._fresh(deferred=False)
        for field, filled in zip(self.unit.layout.fields, self._filled, strict=True):
            if not filled:
                full[field.start : field.stop].zero_()
        return full

    @property
    def _is_own_result(self) -> bool:
        """What is reduced here is the whole result, so that this one tells as well what is not finite in it."""
        return self._reducer.world_size == 1 and self._rest is None and self._whole_result

    def _names_of_non_finite(self, full: Tensor) -> list[str]:
        fields = self.unit.layout.fields if count_non_finite(full) else ()
        return [field.name for field in fields if count_non_finite(full[field.start : field.stop])]

    def find_non_finite(self) -> list[str]:
        """Names of the parameters whose gradient was not finite on this rank, in this window."""
        if self._is_own_result and self.result is not None and not self.non_finite:
            self.non_finite = self._names_of_non_finite(self.result)
        return self.non_finite

    def keep_local(self) -> float:
        """Instead of reducing: what is here is this rank's gradient. Returns the sum of its squares."""
        full = self.local = self._complete()
        low, high = self.unit.own
        self.result = full[low:high]
        squares = sum_of_squares(full)
        self.non_finite = self._names_of_non_finite(full) if not math.isfinite(squares) else []
        return squares

    def mean_of_local(self, tag: Tag) -> Tensor:
        """[own] the mean over ranks of `local`, which stays as it is."""
        assert self.local is not None
        wide = torch.promote_types(self.local.dtype, torch.float32)
        total = self.local.to(wide, copy=True)
        self._reducer.all_reduce(total, tag).wait()
        low, high = self.unit.own
        return total.div_(self._reducer.world_size)[low:high]

    def _result_buffer(self, numel: int, like: Tensor) -> Tensor:
        if self._spare is not None and self._spare.dtype == self._accumulate:
            buffer, self._spare = self._spare, None
            return buffer
        if self._rest is not None:
            return torch.empty(numel, dtype=self._accumulate, device=like.device)
        return resident(numel, self._accumulate, like.device)

    @property
    def in_flight(self) -> bool:
        return bool(self._pending)

    def done(self) -> bool:
        return all(handle.done() for handle in self._pending)

    def land(self) -> None:
        """Wait for the reductions in flight."""
        while self._pending:
            self._pending.pop(0).wait()

    # -------------------------------------------------------------------------------------------------- at rest
    def lay_down(self) -> None:
        """A result that has landed goes to where it rests. A failure is remembered, since other ranks may wait."""
        if self._rest is None or self.result is None or self._pending:
            return
        result = self.result
        self._squares = sum_of_squares(result)
        self.result = self._owner_of_result = None
        self.at_rest = True
        try:
            with self._rest.borrow(self.unit.name, lambda: {"gradient": off_device(result)}, read=False) as state:
                state["gradient"].copy_(result)
        except TierError as error:
            self.failure = self.failure or error

    def _wake(self, numel: int, like: Tensor) -> None:
        """What has been reduced in this window is in memory again, so that more can be added."""
        self._owner_of_result = self.result = torch.zeros(numel, dtype=self._accumulate, device=like.device)
        self.at_rest = False
        try:
            with self._borrow() as kept:
                self.result.copy_(kept)
        except TierError as error:
            self.failure = self.failure or error

    @contextmanager
    def _borrow(self) -> Iterator[Tensor]:
        assert self._rest is not None
        with self._rest.borrow(self.unit.name, write=False) as state:
            yield state["gradient"]

    def borrow_rested(self) -> AbstractContextManager[Tensor]:
        """[own]: the result at rest, for reading. Raises TierError."""
        return self._borrow()

    def prefetch_rested(self) -> None:
        if self._rest is not None and self.at_rest:
            self._rest.prefetch(self.unit.name)

    def read_result(self) -> Tensor | None:
        """[own], wherever it is; None if nothing was reduced in this window. Raises TierError."""
        if not self.at_rest:
            return self.result
        with self._borrow() as kept:
            return kept.to(self.unit.flat.device, copy=True)

    @property
    def reduced(self) -> bool:
        """There is a result in this window."""
        return self.result is not None or self.at_rest

    def squared_norm(self, own: slice) -> float:
        """Of the part `own` of the result; 0 where there is none."""
        if self.at_rest:
            return self._squares
        return sum_of_squares(self.result[own]) if self.result is not None else 0.0

    def spread(self, tag: Tag) -> Handle | None:
        """With whole state (stage 0) the owned parts become the whole mean on every rank."""
        if not self._whole_result or self.result is None or self._gatherer.world_size == 1:
            return None
        low, high = self.unit.layout.owned(self._gatherer.rank)
        return self._gatherer.all_gather(self.result, self.result[low:high], tag)

    # ------------------------------------------------------------------------------------------------ forgetting
    def drop(self) -> None:
        """The window is over: forget its gradients, keep the memory for the next."""
        self.land()
        if self._rest is None:
            self._spare = self._owner_of_result if self._owner_of_result is not None else self._full
        if self._parts[0] is not self._spare:
            self._parts = None, []
        self.at_rest = False
        self.result = self._owner_of_result = self._full = self.local = None
        self.used = [False] * len(self.used)
        self.non_finite = []

    def bytes(self) -> int:
        buffers = {id(b): b for b in (self._full, self._owner_of_result, self._spare) if b is not None}
        return sum(b.numel() * b.element_size() for b in buffers.values())
