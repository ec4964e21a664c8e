"""The contracts between packages: read this file first.

Everything that is chosen by configuration implements one of these small protocols. The engine only sequences them:

    begin -> micro-steps (forward, backward) -> finish_backward -> norm agreed over ranks -> skip or apply -> publish

Vocabulary: a *unit* is a group of parameters communicated together in one flat buffer; a *slice* is the contiguous part
of one unit and one parameter group that this rank updates; a *shard* is the part of one parameter inside a slice.
The scheme is that of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from trilithon.errors import TierError


class SyncMode(Enum):
    """Who averages gradients over data-parallel ranks."""

    MEAN = auto()  # the sharding, during backward
    LOCAL = auto()  # nobody: gradients stay local and the update rule communicates instead


class ReduceOp(Enum):
    """How values of several ranks become one."""

    SUM = auto()
    MAX = auto()
    MIN = auto()


@dataclass(frozen=True, slots=True)
class Tag:
    """What a collective is about; shown by the watchdog when a rank does not arrive."""

    module: str
    parameters: tuple[str, ...] = ()
    step: int = -1
    micro_step: int = -1


@runtime_checkable
class Handle(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Block until the result is in place, finishing arithmetic included. Idempotent."""
        ...

    def done(self) -> bool:
        """True when `wait` would return at once (up to local arithmetic)."""
        ...


class Collectives(Protocol):
    """One group of ranks that talk. With `world_size` 1 every call is a local no-op and no process group is needed."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, full: Tensor, shard: Tensor, tag: Tag) -> Handle:
        """full: [world_size * n]; shard: [n], which may be `full`'s own slice (in place)."""
        ...

    def all_to_all(
        self, out: Tensor, full: Tensor, tag: Tag, *,
        receive: Sequence[int] | None = None, send: Sequence[int] | None = None,
    ) -> Handle:  # fmt: skip
        """out [world_size * n], in rank order: the slice [n] that each rank has for this one in its `full`.

        send, receive: elements for and from each rank, when they differ.
        """
        ...

    def reduce_scatter(
        self, full: Tensor, out: Tensor, tag: Tag, *, scale: float = 1.0, accumulate: bool = False
    ) -> Handle:
        """out [n] becomes (or, with accumulate, gains) scale * sum over ranks of their `full[rank*n:(rank+1)*n]`.

        The sum is taken in rank order in fp32 (fp64 for fp64), so it does not depend on bucketing. `out` may have
        another dtype than `full`, and may be `full`'s own slice. `full` must stay untouched until `wait` returns.
        """
        ...

    def all_reduce(self, tensor: Tensor, tag: Tag, op: ReduceOp = ReduceOp.SUM) -> Handle:
        """In place, any shape; for few elements (flags, norms)."""
        ...

    def broadcast(self, tensor: Tensor, source: int, tag: Tag) -> Handle: ...

    def all_gather_object(self, value: Any, tag: Tag) -> list[Any]:
        """One small picklable value from every rank, in rank order. Blocking."""
        ...

    def barrier(self, tag: Tag) -> None: ...


@dataclass(eq=False, slots=True)
class Shard:
    """A contiguous range of one parameter's flattened elements, owned by this rank, inside a `Slice`."""

    name: str  # fully qualified parameter name
    start: int  # offset in the flattened parameter
    numel: int  # elements owned here (never 0)
    offset: int  # offset in the slice
    shape: torch.Size  # shape of the whole parameter


@dataclass(eq=False, slots=True)
class Slice:
    """The contiguous flat range of one (unit, parameter group) that this rank updates."""

    key: str  # stable and unique, for state stores
    group: int  # index of the parameter group whose settings apply
    master: Tensor  # [n] f32: the values the update rule changes; on "meta" (no values) while they rest in a store
    grad: Tensor  # [n] gradient, f32 or the accumulation dtype; set anew before each update
    low: Tensor | None  # [n] low-precision copy that forward reads, rewritten in the same pass; None when master is it
    shards: list[Shard] = field(default_factory=list)  # in order of offset; what lies between them is zero
    copies: int = 1  # ranks that contribute this slice to a sum by `combine`, this one included
    idle: frozenset[str] = frozenset()  # parameters without gradient on any rank this time: leave them as they are

    brings: ClassVar[bool] = False  # reading `grad` or `low` brings them beside the master: read what is used next only


class Sharding(Protocol):
    """zero/: who holds which slice of parameters, gradients and state."""

    def begin_step(self, sync: SyncMode, step: int) -> None:
        """Called before the first forward of an accumulation window."""
        ...

    def micro_step(self, last: bool) -> None:
        """Called before each backward; `last` says that the update follows this one."""
        ...

    def finish_backward(self) -> None:
        """Everything that hooks launched during this backward has landed."""
        ...

    def slices(self) -> Sequence[Slice]:
        """What this rank updates, gradients reduced. Stable identity between steps."""
        ...

    def combine(self, local: Tensor, op: ReduceOp) -> Tensor:
        """Agree with the holders of the other slices: reduces `local` in place over them and returns it."""
        ...

    def publish(self, slice_: Slice | None = None) -> None:
        """Updated slices become what forward reads; with a slice, that one may be sent on already."""
        ...

    def drop_gradients(self) -> None:
        """Forget the gradients of this window (after a step, or when it is skipped)."""
        ...

    def full(self, kind: str, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Collective: whole tensors of kind "param", "master" or "grad", one at a time, on every rank."""
        ...

    def gathered(self, names: Sequence[str], modify: int | None) -> AbstractContextManager[Mapping[str, Tensor]]: ...

    def close(self) -> None:
        """Give the parameters back whole to the user's model and remove every hook."""
        ...


class Update(Protocol):
    """optim/: gradients -> new values."""

    def sync_mode(self, step: int) -> SyncMode: ...

    def apply(
        self,
        step: int,
        slices: Sequence[Slice],
        grad_scale: float,
        done: Callable[[Slice], None],
        combine: Callable[[Tensor, ReduceOp], Tensor],
    ) -> None:
        """One step, counted from 1. Gradients are multiplied by `grad_scale` as they are read; `done(slice)` is
        called as soon as a slice's new values are in place, in order, for every slice on every rank alike."""
        ...

    def state(self, slice_: Slice, *, write: bool = False) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The flat [n] state of one slice by the field's names: "master", and the rule's own (`exp_avg`, ...), made on
        demand. A context, since it may have to come from another tier; `write` says that it will be changed."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What is not per element: step counts and the like."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def rank_state(self) -> dict[str, Tensor]:
        """What belongs to this rank and not to elements of slices (what compression has not sent yet); {} mostly."""
        ...

    def load_rank_state(
        self, state: Mapping[str, Tensor], saved_ranks: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        """After `load_state_dict`. state: this rank's own. With another number of ranks, saved_ranks: those of all
        ranks that saved, in order; it may be called for one name after the other."""
        ...

    def synchronize(self, slices: Sequence[Slice]) -> bool:
        """Collective. Ranks that have moved on their own since they last communicated become one again; True if so."""
        ...

    def bytes(self) -> dict[str, int]:
        """What the rule keeps on this rank, masters not counted, by tier: "device", "host", "disk"."""
        ...

    def close(self) -> None: ...


State = dict[str, Tensor]


class StateStore(Protocol):
    """tiers/: where optimizer state rests between uses."""

    def borrow(
        self, key: str, make: Callable[[], State] | None = None, *, write: bool = True, read: bool = True
    ) -> AbstractContextManager[State]:
        """The state of one slice, resident for the time of the context. make() makes it the first time; without it
        KeyError is raised then. Not `write`: the caller promises to change nothing. Not `read`: the caller writes every
        element, and what it finds may be anything."""
        ...

    def prefetch(self, key: str) -> None:
        """`borrow` of this key comes soon."""
        ...

    @property
    def failure(self) -> TierError | None:
        """The first request that failed in the background, as far as is known; every `borrow` raises it from then."""
        ...

    def bytes(self) -> dict[str, int]:
        """What is kept, by tier: "device", "host", "disk"."""
        ...

    def close(self) -> None: ...


class Precision(Protocol):
    """optim/loss_scale.py: the scale is part of a checkpoint."""

    @property
    def scale(self) -> float:
        """What the loss is multiplied by before backward; the gradients of this window carry it."""
        ...

    def accept(self, finite: bool) -> bool:
        """Called once per step after the ranks agreed; False: skip this step. Moves the scale for the next one."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class StepHook(Protocol):
    """Curriculum, layer drop, compression, monitors: called with the number of the step that begins."""

    def on_step(self, step: int) -> None: ...
