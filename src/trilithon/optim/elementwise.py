"""The update rules in which every element goes its own way: one formula, run once per slice.

A rule says which state one element needs and how a slice moves; `Elementwise` keeps the state, counts the updates and
implements `contracts.Update`. Settings are read from the parameter groups at every step, so whoever holds those
dictionaries (a scheduler, the user) may change them at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trilithon.contracts import ReduceOp, Slice, State, StateStore, SyncMode
from trilithon.errors import CheckpointError
from trilithon.optim.participation import Participation, cut
from trilithon.tiers import HostLink, ResidentStore, filled, home_of

READ_AHEAD = 2  # slices: enough to keep a disk busy while one is updated; more would only need more memory
Settings = MutableMapping[str, Any]


class Rule(Protocol):
    """One elementwise update rule."""

    @property
    def name(self) -> str:
        """What a checkpoint calls it. `resembles`, where a rule has it: others that keep the same state, so that this
        rule can take over theirs, but move weights by another formula."""
        ...

    def fields(self, settings: Settings) -> Mapping[str, float]:
        """The names of the state tensors under these settings, each with the value it starts from."""
        ...

    def step(
        self, slice_: Slice, state: Mapping[str, Tensor], settings: Settings, update: int, grad_scale: float
    ) -> None:
        """Move one slice; `update` counts the updates made with this state, this one included."""
        ...


class Elementwise:
    """`contracts.Update` of one elementwise rule. State is fp32 (the masters' dtype) and made when first asked for."""

    def __init__(
        self,
        rule: Rule,
        groups: Sequence[Settings],
        hook: RemovableHandle | None = None,
        store: StateStore | None = None,
    ) -> None:
        """hook: on the user's own optimizer, to be removed at the end. store: where state rests; this rule's alone."""
        self.groups = groups
        self._hook = hook
        self._rule = rule
        self.participation = Participation()
        self._store = store if store is not None else ResidentStore()
        self._link = HostLink()

    def sync_mode(self, step: int) -> SyncMode:
        return SyncMode.MEAN

    def apply(
        self,
        step: int,
        slices: Sequence[Slice],
        grad_scale: float,
        done: Callable[[Slice], None],
        combine: Callable[[Tensor, ReduceOp], Tensor],
    ) -> None:
        self.participation.begin(slices)
        self._link.forget()
        runs = {slice_.key: list(self.participation.runs(slice_)) for slice_ in slices}
        moving = [slice_ for slice_ in slices if runs[slice_.key]]
        at = 0
        for slice_ in slices:
            if runs[slice_.key]:
                at += 1
                with self._store.borrow(slice_.key, dict) as state:
                    home = home_of(slice_, state)
                    with self._link.near(slice_, home) as near:
                        for following in moving[at : at + READ_AHEAD]:
                            self._store.prefetch(following.key)
                            self._link.prefetch(following, home)
                        self._move(near, state, runs[slice_.key], grad_scale)
            done(slice_)
        for following in slices[:READ_AHEAD]:  # for the next step: read while forward and backward run
            self._store.prefetch(following.key)

    def move(self, slice_: Slice, grad_scale: float) -> None:
        """One slice's part of `apply`, once the update is counted; for state that is resident."""
        with self._store.borrow(slice_.key, dict) as state:
            self._move(slice_, state, list(self.participation.runs(slice_)), grad_scale)

    def _move(self, slice_: Slice, state: State, runs: Sequence[tuple[int, int, int]], grad_scale: float) -> None:
        self._complete(slice_, state)
        for start, stop, update in runs:
            part, its_state = cut(slice_, state, start, stop)
            self._rule.step(part, its_state, self.groups[slice_.group], update, grad_scale)

    def _complete(self, slice_: Slice, state: State) -> None:
        """Settings may ask for a field that was not there before (momentum switched on)."""
        for name, start in self._rule.fields(self.groups[slice_.group]).items():
            if name not in state:
                state[name] = filled(state.get("master", slice_.master), start)

    @contextmanager
    def state(self, slice_: Slice, *, write: bool = False) -> Iterator[Mapping[str, Tensor]]:
        with self._store.borrow(slice_.key, dict, write=write) as state:
            self._complete(slice_, state)
            yield {"master": slice_.master, **state}

    def state_dict(self) -> dict[str, Any]:
        return {"rule": self._rule.name, **self.participation.state_dict()}

    @property
    def resembles(self) -> tuple[str, ...]:
        """Rules whose state this one can take over, though it moves weights by another formula."""
        return tuple(getattr(self._rule, "resembles", ()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        written = state.get("rule")
        name = str(written) if written in self.resembles else self._rule.name
        self.participation.load(read_updates(state, name), state.get("missed", {}))

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
        if self._hook is not None:
            self._hook.remove()


def read_updates(state: Mapping[str, Any], name: str) -> int:
    """The update count of a rule's `state_dict`. Raises CheckpointError if another rule wrote it."""
    if state.get("rule") != name or not isinstance(state.get("updates"), int):
        raise CheckpointError(
            f"The optimizer state was written by rule {state.get('rule')!r} (updates={state.get('updates')!r}), but "
            f"the configured rule is {name!r}. Configure the same optimizer, or load without optimizer state."
        )
    return int(state["updates"])
