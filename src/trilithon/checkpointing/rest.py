"""Where the inputs of recomputed blocks rest until backward asks for them: the contract, and the simplest place.

`keep` takes one input as its block begins, `fetch` gives it back as the block is computed again. Other places:
`offload.HostRest` (host memory), `contiguous.ContiguousRest` (buffers made once), `partition.PartitionedRest` (a part
on each tensor rank, kept in any of these).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from trilithon.errors import ProtocolError

K = TypeVar("K")


class Kept(Protocol):
    """One tensor that backward will ask for."""

    def fetch(self) -> Tensor:
        """Its values, a leaf that asks for a gradient if the tensor did."""
        ...


class Rest(Protocol):
    """Keeps the inputs of blocks, call by call."""

    def begin(self, block: Hashable) -> None:
        """The inputs that come now belong to a call of this block."""
        ...

    def keep(self, tensor: Tensor) -> Kept: ...

    def bytes(self) -> dict[str, int]:
        """What is kept now, by tier; memory that waits to be used again included."""
        ...

    def close(self) -> None: ...


class Counter:
    """Bytes of what is kept; one tensor that several blocks keep counts once."""

    def __init__(self) -> None:
        self.bytes = self.peak_bytes = 0
        self._holders: dict[int, int] = {}

    def hold(self, holder: object, key: int, size: int) -> None:
        """`holder` keeps `size` bytes until it is gone; holders with one key keep the same ones."""
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(holder, self._let_go, key, size).atexit = False

    def _let_go(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.bytes -= size


class Known(Generic[K]):
    """What was kept of tensors that are still around and unchanged: blocks that read one tensor keep it once."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[K]]] = {}

    def find(self, tensor: Tensor) -> K | None:
        source, version, kept = self._found.get(id(tensor), (None, 0, None))
        if source is None or kept is None or source() is not tensor or tensor._version != version:
            return None
        return kept()

    def remember(self, tensor: Tensor, kept: K) -> None:
        key = id(tensor)
        gone = weakref.ref(tensor, lambda _: self._found.pop(key, None))
        self._found[key] = (gone, tensor._version, weakref.ref(kept))


class Form:
    """How a tensor lies in memory, so that a flat copy of it becomes the same tensor again, strides included."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.device, self.numel = tensor.shape, tensor.device, tensor.numel()
        self._stride = tensor.stride() if _without_gaps(tensor.shape, tensor.stride()) else None

    def flat(self, tensor: Tensor) -> Tensor:
        """[numel], in the order in which it lies in memory if that has no gaps."""
        tensor = tensor.detach()
        if self._stride is None:
            return tensor.reshape(-1)
        return tensor.as_strided((self.numel,), (1,), tensor.storage_offset())

    def shaped(self, flat: Tensor) -> Tensor:
        """A view of what `flat` gave, or of a copy."""
        if self._stride is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self._stride, flat.storage_offset())


def _without_gaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Each element has a place of its own, and there is none between them."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


class _Here:
    """Kept where it is; noticed when something writes over it."""

    def __init__(self, tensor: Tensor, counter: Counter) -> None:
        self._alias, self._version, self._asks = tensor.detach(), tensor._version, tensor.requires_grad
        storage = tensor.untyped_storage()
        counter.hold(self, storage._cdata, tensor.numel() * tensor.element_size())

    def fetch(self) -> Tensor:
        if self._alias._version != self._version:
            raise ProtocolError(
                f"the input of shape {tuple(self._alias.shape)} of a recomputed block was modified in place after the "
                "block had used it, so its activations cannot be computed again. Modify a copy, or leave the block out "
                "of `recompute`."
            )
        return self._alias.detach().requires_grad_(self._asks)


class DeviceRest:
    """Inputs stay where they are."""

    def __init__(self) -> None:
        self._counter = Counter()

    def begin(self, block: Hashable) -> None:
        """Nothing to prepare."""

    def keep(self, tensor: Tensor) -> Kept:
        return _Here(tensor, self._counter)

    @property
    def peak_bytes(self) -> int:
        return self._counter.peak_bytes

    def bytes(self) -> dict[str, int]:
        return {"device": self._counter.bytes} if self._counter.bytes else {}

    def close(self) -> None:
        """Nothing is held beyond the graphs."""


class Memory(Protocol):
    """Flat memory that is used again and again: `offload.BySize`, or `contiguous.Buffers`."""

    def take(self, like: Tensor) -> tuple[Tensor, list[torch.cuda.Event]]:
        """(flat memory for as many elements of the same type, what to wait for before it is written)."""
        ...

    def give_back(self, flat: Tensor, read: torch.cuda.Event | None) -> None:
        """Nobody needs what is in it, once `read` has happened."""
        ...

    @property
    def bytes(self) -> int:
        """All of it, in use or not."""
        ...

    def close(self) -> None: ...
