"""Modules whose parameters are gathered as one unit at stage 3: `set_z3_leaf_modules` and its relatives.

They are marked before deepspeed.initialize(), which hands their classes on as `zero.unit_classes`. Modules of experts
that ranks use differently need it, since all ranks have to gather the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
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


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes (or names of classes); returns them. Raises ValueError if there are none."""
    return _mark(model, _of_class(leaf_module_classes), leaf_module_classes, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark away; returns the modules. Raises ValueError if there are none of these classes."""
    found = _matching(model, _of_class(leaf_module_classes), leaf_module_classes, raise_if_not_found)
    for module in found:
        _LEAVES.discard(module)
    return found


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take its mark away."""
    (_LEAVES.add if flag else _LEAVES.discard)(model)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in the model; returns (modules, names that were not found)."""
    known = dict(model.named_modules())
    missing = [name for name in module_names if name not in known]
    wanted = set(module_names)
    return _mark(model, lambda name, _: name in wanted, module_names, raise_if_not_found), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules whose names end so; returns (modules, suffixes that fit none)."""
    names = [name for name, _ in model.named_modules()]
    missing = [suffix for suffix in module_name_suffixes if not any(name.endswith(suffix) for name in names)]
    ends = tuple(module_name_suffixes)
    return _mark(model, lambda name, _: name.endswith(ends), module_name_suffixes, raise_if_not_found), missing


def _of_class(wanted: Iterable[type | str]) -> Callable[[str, nn.Module], bool]:
    kinds = list(wanted)
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    names = {kind for kind in kinds if isinstance(kind, str)}

    def fits(_name: str, module: nn.Module) -> bool:
        own = type(module)
        return isinstance(module, classes) or bool({own.__name__, f"{own.__module__}.{own.__qualname__}"} & names)

    return fits


def _mark(model: nn.Module, fits: Callable[[str, nn.Module], bool], asked: Any, strict: bool) -> list[nn.Module]:
    found = _matching(model, fits, asked, strict)
    _LEAVES.update(found)
    return found


def _matching(model: nn.Module, fits: Callable[[str, nn.Module], bool], asked: Any, strict: bool) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if fits(name, module)]
    if not found and strict:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"no module of the model is {list(asked)}; its classes are {kinds[:12]}.")
    return found
