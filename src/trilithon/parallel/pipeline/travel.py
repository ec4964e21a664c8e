"""What goes from one stage to the next: tensors in any nesting of tuples, lists and dictionaries, and plain values.

Tensors that are not floating (masks, token numbers) travel in their own type; gradients come back for floating ones
that depend on something trainable. What a receiver has to know before (`Form`) goes ahead the first time that inputs of
these shapes pass, and with every message if shapes depend on values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Shape:
    """One tensor on its way. needs_grad: its gradient is sent back."""

    dtype: torch.dtype
    size: tuple[int, ...]
    needs_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Form:
    """Everything about a value but the elements of its tensors. leaves: `Shape` for a tensor, else the value itself."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """As text, since torch's own pickles of tree specifications warn."""
        return _form, (pytree.treespec_dumps(self.spec), self.leaves)

    @property
    def shapes(self) -> list[Shape]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Shape)]

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value whose tensors these are."""
        following = iter(tensors)
        return pytree.tree_unflatten(
            [next(following) if isinstance(leaf, Shape) else leaf for leaf in self.leaves], self.spec
        )


def _form(spec: str, leaves: tuple[Any, ...]) -> Form:
    return Form(pytree.treespec_loads(spec), leaves)


def take_apart(value: Any) -> tuple[Form, list[Tensor]]:
    """The form of a value, and its tensors in order."""
    leaves, spec = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    described = tuple(
        Shape(leaf.dtype, tuple(leaf.shape), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    )
    return Form(spec, described), tensors


def signature(value: Any) -> str:
    """Shapes, types and plain values of the inputs of a micro-batch, as text that is the same whenever they are."""
    leaves, spec = pytree.tree_flatten(value)
    parts = [
        f"{leaf.dtype}{tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{type(leaf).__name__}:{leaf!r}"
        for leaf in leaves
    ]
    return f"{spec}|{'|'.join(parts)}"
