"""Modules that are one unit at stage 3 because the program says so, whatever their size or class.

    trilithon.zero.one_unit(model.layers[3].experts)      # before trilithon.initialize
    engine = trilithon.initialize(model, config)

`zero.unit_classes` says the same of classes, in the configuration. Modules whose children ranks use differently need
one or the other: all ranks have to gather the same.
"""

from __future__ import annotations

import weakref

from torch import nn

_MARKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def one_unit(module: nn.Module, marked: bool = True) -> None:
    """The parameters of the module, its children's included, are gathered together; marked=False: as before."""
    (_MARKED.add if marked else _MARKED.discard)(module)


def is_one_unit(part: nn.Module | nn.Parameter) -> bool:
    """`one_unit` was said of the module, or of one that holds the parameter."""
    if isinstance(part, nn.Module):
        return part in _MARKED
    return any(part is param for module in list(_MARKED) for param in module.parameters())
