"""How many bytes of tensors are alive: those made inside a context and not freed yet, whatever the process has of them.

    with LiveBytes() as live:
        loss = model(batch)
        print(live.bytes)        # activations that wait for backward, and the loss
    print(live.peak_bytes)

Resident memory also counts what allocators keep, so it cannot be held against a formula; this can, to the byte.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts storages that operators make inside the context, each once. What existed before (parameters, inputs) and
    what is made without an operator (memory mapped by hand) is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}  # 0 bytes: from outside
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._forget_freed()
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, made=False)
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            self._note(tensor, made=True)
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._known.values()))
        return output

    def _note(self, tensor: Tensor, *, made: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes() if made else 0

    def _forget_freed(self) -> None:
        for key in [key for key, (storage, _) in self._known.items() if storage.expired()]:
            del self._known[key]

    @property
    def bytes(self) -> int:
        """Alive now."""
        self._forget_freed()
        return sum(size for _, size in self._known.values())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
