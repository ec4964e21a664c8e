"""Where the state of an update rule rests between uses (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from trilithon.contracts import State


class ResidentStore:
    """`contracts.StateStore` for state that stays where it is made."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    @contextmanager
    def borrow(self, key: str, make: Callable[[], State] | None = None, *, write: bool = True) -> Iterator[State]:
        """make() is called when nothing is kept under `key`; without it, KeyError."""
        if key not in self._states:
            if make is None:
                raise KeyError(f"no state is kept under {key!r}")
            self._states[key] = make()
        yield self._states[key]

    def prefetch(self, key: str) -> None:
        """Nothing to do: it is here."""

    def bytes(self) -> dict[str, int]:
        return bytes_by_tier(tensor for state in self._states.values() for tensor in state.values())

    def close(self) -> None:
        self._states.clear()


def bytes_by_tier(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Bytes of resident tensors: {"host": ..., "device": ...}, without those that hold none."""
    found: dict[str, int] = {}
    for tensor in tensors:
        tier = "host" if tensor.device.type == "cpu" else "device"
        found[tier] = found.get(tier, 0) + tensor.numel() * tensor.element_size()
    return found
