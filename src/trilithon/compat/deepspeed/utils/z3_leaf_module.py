"""Modules whose parameters are gathered as one unit at stage 3: `set_z3_leaf_modules` and its relatives.

They are marked before deepspeed.initialize(), which hands their classes on as `zero.unit_classes`. Modules of experts
that ranks use differently need it, since all ranks have to gather the same. Functions that are asked for several raise
ValueError, unless told not to, if no module of the model is one of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

_LEAVES: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def z3_leaf_module(model: nn.Module) -> bool:
    """The module is marked."""
    return model in _LEAVES


def z3_leaf_parameter(param: Any) -> bool:
    """The parameter belongs to a marked module."""
    return any(param is one for module in list(_LEAVES) for one in module.parameters())


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of a model."""
    return [module for module in model.modules() if module in _LEAVES]


def leaf_classes(model: nn.Module) -> tuple[str, ...]:
    """Names of the classes of the marked modules, for `zero.unit_classes`."""
    return tuple(dict.fromkeys(type(module).__name__ for module in get_z3_leaf_modules(model)))


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take its mark away."""
    (_LEAVES.add if flag else _LEAVES.discard)(model)


def _set(
    model: nn.Module, asked: Iterable[Any], strict: bool, fits: Callable[[str, nn.Module, Any], bool], flag: bool = True
) -> tuple[list[nn.Module], list[Any]]:
    """(the modules that fit one of what is asked, which get the flag; what fits none)."""
    named, wanted = list(model.named_modules()), list(asked)
    found = [module for name, module in named if any(fits(name, module, one) for one in wanted)]
    if not found and strict:
        kinds = sorted({type(module).__name__ for _, module in named})
        raise ValueError(f"no module of the model is {wanted}; its classes are {kinds[:12]}.")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, [one for one in wanted if not any(fits(name, module, one) for name, module in named)]


def _is_a(_: str, module: nn.Module, kind: type | str) -> bool:
    own = type(module)
    if isinstance(kind, type):
        return isinstance(module, kind)
    return kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True, flag: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes (or names of classes); returns them."""
    return _set(model, leaf_module_classes, raise_if_not_found, _is_a, flag)[0]


unset_z3_leaf_modules = partial(set_z3_leaf_modules, flag=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in the model; returns (modules, names that were not found)."""
    return _set(model, module_names, raise_if_not_found, lambda name, _, wanted: name == wanted)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules whose names end so; returns (modules, suffixes that fit none)."""
    return _set(model, module_name_suffixes, raise_if_not_found, lambda name, _, end: name.endswith(end))
