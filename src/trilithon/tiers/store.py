"""Where the state of an update rule rests between uses (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from trilithon.contracts import State, StateStore
from trilithon.errors import TierError


class ResidentStore:
    """`contracts.StateStore` for state that stays where it is made.

    tier: what it is counted as; None counts each tensor by where it lies. On a machine without an accelerator, "host"
    and "device" are the same memory, and only this tells them apart.
    """

    failure = None  # memory that is there does not fail

    def __init__(self, tier: str | None = None) -> None:
        self._tier = tier
        self._states: dict[str, State] = {}

    @contextmanager
    def borrow(
        self, key: str, make: Callable[[], State] | None = None, *, write: bool = True, read: bool = True
    ) -> Iterator[State]:
        """make() is called when nothing is kept under `key`; without it, KeyError."""
        if key not in self._states:
            if make is None:
                raise KeyError(f"no state is kept under {key!r}")
            self._states[key] = make()
        yield self._states[key]

    def prefetch(self, key: str) -> None:
        """Nothing to do: it is here."""

    def bytes(self) -> dict[str, int]:
        found = bytes_by_tier(tensor for state in self._states.values() for tensor in state.values())
        return found if self._tier is None else {self._tier: sum(found.values())}

    def close(self) -> None:
        self._states.clear()


class SplitStore:
    """`contracts.StateStore` that keeps some keys near and the others far (partial offload).

    near: of the keys that rest on the device. (ZeRO-Offload++ calls the share of the others `ratio`.)
    """

    def __init__(self, near: ResidentStore, far: StateStore, is_near: Callable[[str], bool]) -> None:
        self._near, self._far, self._is_near = near, far, is_near

    @property
    def failure(self) -> TierError | None:
        return self._far.failure

    def borrow(
        self, key: str, make: Callable[[], State] | None = None, *, write: bool = True, read: bool = True
    ) -> AbstractContextManager[State]:
        return (self._near if self._is_near(key) else self._far).borrow(key, make, write=write, read=read)

    def prefetch(self, key: str) -> None:
        if not self._is_near(key):
            self._far.prefetch(key)

    def bytes(self) -> dict[str, int]:
        found = self._far.bytes()
        for tier, size in self._near.bytes().items():
            found[tier] = found.get(tier, 0) + size
        return found

    def close(self) -> None:
        self._near.close()
        self._far.close()


def bytes_by_tier(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Bytes of resident tensors: {"host": ..., "device": ...}, without those that hold none."""
    found: dict[str, int] = {}
    for tensor in tensors:
        tier = "host" if tensor.device.type == "cpu" else "device"
        found[tier] = found.get(tier, 0) + tensor.numel() * tensor.element_size()
    return found
