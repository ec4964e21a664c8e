"""A unit: parameters that are communicated together, in one flat buffer whose views are the parameters.

A ZeRO stage is three answers, and two of them live here: is the fp32 state of the unit whole on every rank (stage 0)
or a shard of it (1 to 3), and are the low-precision values whole between uses (0 to 2) or gathered for each use (3).
Because the buffer that is gathered into is the buffer whose views the parameters are, nothing is copied in or out.
(Rajbhandari et al. 2020, arXiv:1910.02054, section 5; the freed buffer is refilled in the same storage, so that what
autograd saved sees the values again.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from trilithon.contracts import Collectives, Handle, StateStore, Tag
from trilithon.errors import ProtocolError, TierError
from trilithon.tiers import off_device, settle
from trilithon.zero.layout import FlatLayout
from trilithon.zero.sharded_parameter import bring_back, put_away


class Residency(Enum):
    """Where the low-precision values of a unit are."""

    SHARDED = auto()  # this rank holds its shard only
    GATHERING = auto()  # the all-gather is launched, not yet waited for
    WHOLE = auto()  # forward and backward may read the parameters


_ALLOWED = {
    (Residency.SHARDED, Residency.GATHERING),
    (Residency.GATHERING, Residency.WHOLE),
    (Residency.WHOLE, Residency.SHARDED),
}


class Unit:
    """Parameters of one dtype, all trainable or all frozen, in one flat buffer.

    name: for tags and messages; params: in the order of `layout.fields`; dtype: what forward computes in.
    whole_state: every rank keeps all master values; whole_values: the parameters stay whole between uses. rest: where
    this rank's part of the values is kept between uses; None: in `shard`.
    """

    def __init__(
        self,
        index: int,
        name: str,
        params: Sequence[nn.Parameter],
        layout: FlatLayout,
        *,
        comm: Collectives,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
        trainable: bool,
        whole_state: bool,
        whole_values: bool,
        rest: StateStore | None = None,
    ) -> None:
        self.index, self.name, self.params, self.layout = index, name, list(params), layout
        self.trainable, self.whole_values = trainable, whole_values
        self.comm, self.dtype, self.master_dtype = comm, dtype, master_dtype
        self.users = 0  # forwards and contexts that need the values now
        self.own = (0, layout.padded) if whole_state else layout.owned(comm.rank)
        self.flat = torch.empty(0, dtype=dtype)  # [padded] low precision; its storage is empty while SHARDED
        self.rest = rest
        self.failure: TierError | None = None  # of a read; the values gathered then are not those of the model
        self.shard = self.flat  # [own] low precision: what is gathered from; without values ("meta") while they rest
        self.master = self.flat  # [own] master values (`shard` itself when the types are the same); empty when frozen
        self._views: list[Tensor] = []
        self._bytes = 0
        self._handle: Handle | None = None
        self.residency = Residency.WHOLE

    # ---------------------------------------------------------------------------------------------- construction
    def adopt(self, values: Tensor, *, keep_master: bool = True) -> None:
        """Take over whole initial values, [padded] in the master type, gaps zero; they may be freed afterwards.

        keep_master: False when the masters of this rank rest elsewhere.
        """
        low, high = self.own
        if self.whole_values:
            self.flat = settle(values, self.dtype)
        else:
            self.flat = torch.empty(values.numel(), dtype=self.dtype, device=values.device)  # untouched until a gather
        self._views = [self.flat[f.start : f.stop].view(f.shape) for f in self.layout.fields]
        self._bytes = self.flat.untyped_storage().nbytes()
        mine = self.flat[low:high]
        if self.whole_values:
            self.shard = mine
        elif self.rest is not None:
            with self.rest.borrow(self.name, lambda: {"values": off_device(values[low:high], self.dtype)}):
                pass
            self.shard = torch.empty(high - low, dtype=self.dtype, device="meta")
        else:
            self.shard = settle(values[low:high], self.dtype)
        if not self.trainable or not keep_master:
            self.master = torch.empty(0, dtype=self.master_dtype if self.trainable else self.dtype)
        elif self.dtype == self.master_dtype and self.rest is None:
            self.master = self.shard
        else:
            self.master = settle(values[low:high])
        bring_back(self.params, self._views, rewind=False)
        if not self.whole_values:
            self._put_away()

    # ------------------------------------------------------------------------------------------------- residency
    def _move(self, to: Residency) -> None:
        if (self.residency, to) not in _ALLOWED:
            raise ProtocolError(f"unit {self.name}: {self.residency.name} -> {to.name} is not a legal move")
        self.residency = to

    def tag(self, step: int = -1, micro_step: int = -1) -> Tag:
        return Tag(self.name, tuple(field.name for field in self.layout.fields), step, micro_step)

    def launch_gather(self, tag: Tag) -> None:
        """SHARDED -> GATHERING; returns at once."""
        self._move(Residency.GATHERING)
        self.flat.untyped_storage().resize_(self._bytes)
        with _unsafe_preserve_version_counter(self.flat):
            self._handle = self.comm.all_gather(self.flat, self._bring(), tag)

    def _bring(self) -> Tensor:
        """What is gathered from. A read that fails is remembered, not raised: the other ranks wait in the gather."""
        if self.rest is None:
            return self.shard
        here = self.flat[self.own[0] : self.own[1]]
        try:
            with self.borrow_values() as values:
                here.copy_(values)
        except TierError as error:
            self.failure = self.failure or error
            here.fill_(float("nan") if self.dtype.is_floating_point else 0)  # shows, if anybody should go on with it
        return here

    @contextmanager
    def borrow_values(self, *, write: bool = False) -> Iterator[Tensor]:
        """[own] of the unit's type, from where it rests; with `write`, changes count. Raises TierError."""
        if self.rest is None:
            yield self.shard
            return
        with self.rest.borrow(self.name, write=write) as state:
            yield state["values"]

    def read_values(self) -> Tensor:
        """[own] on the unit's device: the values themselves when they are resident, else a copy. Raises TierError."""
        if self.rest is None:
            return self.shard
        with self.borrow_values() as values:
            return values.to(self.flat.device, copy=True)

    @property
    def values_bytes(self) -> int:
        """Of the values that stay on the device between uses."""
        here = self.flat if self.whole_values else self.shard
        return here.numel() * here.element_size() if self.rest is None else 0

    def prefetch(self) -> None:
        """Begin to read the values, if there is room for them."""
        if self.rest is not None:
            self.rest.prefetch(self.name)

    def finish_gather(self) -> None:
        """GATHERING -> WHOLE."""
        assert self._handle is not None
        with _unsafe_preserve_version_counter(self.flat):
            self._handle.wait()
        self._handle = None
        bring_back(self.params, self._views)
        self._move(Residency.WHOLE)

    def free(self) -> None:
        """Drop the whole values, if they need not stay."""
        if self.whole_values or self.residency is Residency.SHARDED:
            return
        if self.residency is Residency.GATHERING:
            self.finish_gather()
        self._put_away()

    def _put_away(self) -> None:
        put_away(self.params)
        self.flat.untyped_storage().resize_(0)
        self._move(Residency.SHARDED)

    def forget(self) -> None:
        """Drop everything: nobody will ask for the values again."""
        self.free()
        self.shard = self.master = self.flat = self.flat.new_empty(0)
        self._views = []

    def release(self) -> None:
        """Leave the parameters whole and independent of this unit; called while WHOLE, when the engine closes."""
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view.clone()

    # --------------------------------------------------------------------------------------------------- updates
    def launch_publish(self, tag: Tag) -> Handle | None:
        """After an update: what must be gathered again now, or None (state whole, or values sharded anyway)."""
        if not self.whole_values or self.own == (0, self.layout.padded):
            return None
        return self.comm.all_gather(self.flat, self.shard, tag)

    def take_over(self, field_index: int) -> None:
        """The whole values of one parameter were rewritten: refresh this rank's shard and resident master. While WHOLE.

        A master that still rounds to the value beside it was not written, and keeps its digits.
        """
        field = self.layout.fields[field_index]
        low, high = max(self.own[0], field.start), min(self.own[1], field.stop)
        if low >= high:
            return
        here = slice(low - self.own[0], high - self.own[0])
        if not self.whole_values:
            with self.borrow_values(write=True) as shard:
                shard[here].copy_(self.flat[low:high])
        if self.master.numel() and self.master.data_ptr() != self.shard.data_ptr():
            self.rewrite(self.master[here], self.flat[low:high])

    def rewrite(self, master: Tensor, values: Tensor) -> None:
        """master [n] follows values [n] of the unit's type where they were written."""
        beside = values.to(master.device)
        written = master.to(self.dtype) != beside
        master.copy_(torch.where(written, beside.to(self.master_dtype), master))
