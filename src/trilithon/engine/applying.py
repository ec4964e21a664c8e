"""An accepted gradient becomes new parameters: at once, or one step later while the next forward and backward run.

The delayed update of ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840, section 5.2), with p_i the parameters that step i
uses, G_i its gradient and S the first delayed step:

    p_{i+1} = update(p_i, G_i)        i < S
    p_{S+1} = p_S
    p_{i+1} = update(p_i, G_{i-1})    i > S

Rate, clip factor and loss scale are those of the step that made the gradient. A gradient that is skipped is dropped,
and the one before it still lands. Draining applies the gradient that waits; the step after it begins like step S.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from trilithon.contracts import ReduceOp, Slice, Update
from trilithon.errors import ProtocolError, TierError
from trilithon.tiers import resident
from trilithon.zero.sharding import ZeroSharding


class Applying:
    """Everything at once. After a TierError, which every rank gets, the weights are those of no step: `broken`."""

    def __init__(self, sharding: ZeroSharding, update: Update) -> None:
        self._sharding, self._update = sharding, update
        self.broken: TierError | None = None

    def apply(self, step: int, idle: frozenset[str], grad_scale: float) -> None:
        """Collective. Parameters are new and whole again when it returns. Raises TierError on all ranks alike."""
        slices = self._sharding.slices()
        for part in slices:
            part.idle = idle
        error = None
        try:
            self._update.apply(step, slices, grad_scale, self._sharding.publish, self._sharding.combine)
        except TierError as caught:  # the others are on their way to the gathers, so this rank takes part in them
            error = caught
        self._publish(error)

    def _publish(self, error: TierError | None) -> None:
        self._sharding.publish()
        try:
            self._sharding.raise_together(error, "updating state")
        except TierError as agreed:
            agreed.add_note(
                "trilithon: the weights in these processes are those of no step. Close the engine and go on from a "
                "checkpoint."
            )
            self.broken = agreed
            raise

    def skip(self) -> None:
        """This step's gradient is dropped."""

    def drain(self) -> None:
        """Make ranks one that moved on their own, if they did. Collective then."""
        if self._update.synchronize(self._sharding.slices()):
            self._sharding.publish()

    def abandon(self, reason: TierError) -> None:
        """Not collective: nothing is applied any more, and nothing runs in the background when it returns."""
        self.broken = self.broken or reason

    def bytes(self) -> int:
        """Kept for gradients that wait."""
        return 0


class _Groups(Protocol):
    groups: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class _Waiting:
    """A gradient that is being applied in the background."""

    thread: threading.Thread
    errors: list[BaseException]
    live: Sequence[Mapping[str, Any]]  # the settings that others hold and change


class DelayedApplying(Applying):
    """One step late, from step `after` + 1 on. The update must be elementwise and keep its masters apart."""

    def __init__(self, sharding: ZeroSharding, update: Update, after: int) -> None:
        super().__init__(sharding, update)
        self._after = after
        self._waiting: _Waiting | None = None
        self._held: dict[str, tuple[Tensor, Tensor]] = {}  # by slice: gradient, and the low-precision result

    def apply(self, step: int, idle: frozenset[str], grad_scale: float) -> None:
        self._land()
        if step <= self._after:
            super().apply(step, idle, grad_scale)
            return
        shadows = [self._hold(part, idle) for part in self._sharding.slices()]
        rule, errors = self._rule(), list[BaseException]()
        live = rule.groups
        rule.groups = [dict(group) for group in live]

        def run() -> None:
            try:
                with torch.no_grad():
                    self._update.apply(step, shadows, grad_scale, _nothing, _no_talk)
            except BaseException as error:  # told by the step that waits for it
                errors.append(error)

        thread = threading.Thread(target=run, name="trilithon-delayed-update")
        self._waiting = _Waiting(thread, errors, live)
        thread.start()

    def _rule(self) -> _Groups:
        return self._update  # type: ignore[return-value]

    def _hold(self, part: Slice, idle: frozenset[str]) -> Slice:
        """The slice with a gradient and a result of its own beside its state: the next step needs the others."""
        assert part.low is not None, "masters apart were promised"
        grad, low = self._held.get(part.key, (None, None))
        if grad is None or low is None or grad.dtype != part.grad.dtype:
            home = torch.device("cpu") if part.master.device.type == "meta" else part.master.device
            grad = resident(part.grad.numel(), part.grad.dtype, home)
            low = resident(part.low.numel(), part.low.dtype, home)
            self._held[part.key] = (grad, low)
        grad.copy_(part.grad)
        low.copy_(part.low)  # what sits out keeps its value
        return replace(part, grad=grad, low=low, idle=idle)

    def _land(self) -> None:
        """Wait for the update in the background and publish its result. Collective if one is there."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        waiting.thread.join()
        self._rule().groups = waiting.live
        error: TierError | None = None
        for caught in waiting.errors:
            if not isinstance(caught, TierError):
                raise caught
            error = caught
        try:
            for part in self._sharding.slices() if error is None else ():
                assert part.low is not None
                part.low.copy_(self._held[part.key][1])
        except TierError as caught:  # where it rests is of no use any more
            error = caught
        self._publish(error)

    def skip(self) -> None:
        self._land()

    def drain(self) -> None:
        self._land()

    def abandon(self, reason: TierError) -> None:
        """What was computed still lands when the engine is closed, because the other ranks land it then."""
        super().abandon(reason)
        if self._waiting is not None:
            self._waiting.thread.join()

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self._held.values() for t in pair)


def _nothing(_: Slice) -> None:
    """Nothing is published before the step's end: the forward that runs meanwhile reads the old values."""


def _no_talk(local: Tensor, op: ReduceOp) -> Tensor:
    raise ProtocolError("an update in the background cannot talk to other ranks; it has to be elementwise")


def make_applying(sharding: ZeroSharding, update: Update | None, after: int | None) -> Applying | None:
    """after: steps before the delay begins; None for none."""
    if update is None:
        return None
    return Applying(sharding, update) if after is None else DelayedApplying(sharding, update, after)
