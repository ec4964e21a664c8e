"""Modules whose parameters are gathered as one unit at stage 3, on `trilithon.zero.one_unit`.

They are marked before deepspeed.initialize(). Functions that are asked for several raise ValueError, unless told not
to, if no module of the model is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from trilithon import zero

z3_leaf_module = z3_leaf_parameter = zero.is_one_unit


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    zero.one_unit(model, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if zero.is_one_unit(module)]


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
        zero.one_unit(module, flag)
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
    """By their names in the model; returns (modules, names that were not found)."""
    return _set(model, module_names, raise_if_not_found, lambda name, _, wanted: name == wanted)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """By how their names end; returns (modules, suffixes that fit none)."""
    return _set(model, module_name_suffixes, raise_if_not_found, lambda name, _, end: name.endswith(end))
