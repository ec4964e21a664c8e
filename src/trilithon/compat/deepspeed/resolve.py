"""Modules and names of DeepSpeed, made of what `names` tells of them when they are first asked for.

Importing the package therefore costs nothing (no importlib.abc either, which takes 10 ms) and touches no device. A
module is a file at its path here, told of in `names`, or both. Under the name `deepspeed` (see `stand_in`) and under an
alias it is the same module again.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from trilithon.compat.deepspeed import names
from trilithon.compat.deepspeed.names import ROOT
from trilithon.compat.deepspeed.refused import refused

NAME = "deepspeed"
_ELSE = "docs/compat.md lists the names that are there, and our own ones for the rest."


class MissingNameError(AttributeError):
    """A name of DeepSpeed that is not here; the message says what to use instead."""


def _table(text: str) -> Mapping[str, list[list[str]]]:
    """Module -> the words of each of its lines."""
    found = defaultdict(list)
    for line in text.strip().replace("\n    ", " ").split("\n"):
        module, *words = line.split()
        found[module.strip(".")].append(words)
    return dict(found)


def _ways(lines: Iterable[list[str]]) -> dict[str, str]:
    """Name -> the way out, of a module's lines."""
    parts = (" ".join(words).partition(": ") for words in lines)
    return {name: way for heads, _, way in parts for name in heads.split()}


_HOMES, _REFUSED, _INSTEAD, _TEXTS = map(_table, (names.HOMES, names.REFUSED, names.INSTEAD, names.TEXTS))
_TOLD = {*names.ALIASES, *names.VALUES, *_HOMES, *_REFUSED, *_TEXTS} - {""}
_MODULES = {".".join(path.split(".")[:depth]) for path in _TOLD for depth in range(1, path.count(".") + 2)}


def instead_of(path: str) -> dict[str, str]:
    """What is said of the names that a module or class does not have."""
    return _ways(_INSTEAD.get(path, ()))


def fill(module: ModuleType) -> Callable[[str], Any]:
    """Give a module what is told of it. Returns its `__getattr__` (PEP 562)."""
    path = module.__name__.removeprefix(ROOT).removeprefix(".")
    shown, homes = f"{path}." if path else "", {}
    refusals, instead = _ways(_REFUSED.get(path, ())), instead_of(path)
    for home, *words in _HOMES.get(path, ()):
        for name, _, other in (word.partition("=") for word in words):
            homes[name] = (ROOT + home if home.startswith(".") else home, other or name)
    any_other = homes.pop("*", None)

    def find(name: str) -> Any:
        if name in homes:
            home, other = homes[name]
            value = getattr(import_module(home), other)
        elif name in refusals:
            value = refused(shown + name, refusals[name])
        elif name[0] != "_" and hasattr(module, "__path__") and importlib.util.find_spec(f"{module.__name__}.{name}"):
            value = import_module(f"{module.__name__}.{name}")
        elif any_other and hasattr(import_module(any_other[0]), name):
            value = getattr(import_module(any_other[0]), name)
        else:
            way = instead.get(name) or instead.get("*") or _ELSE
            raise MissingNameError(f"{NAME}.{shown}{name} does not exist here. {way}")
        setattr(module, name, value)
        return value

    here = vars(module)
    here.update(names.VALUES.get(path, {}))
    for words in _TEXTS.get(path, ()):
        here.update({name: text or name.lower() for name, _, text in (word.partition("=") for word in words)})
    own = [name for name in here if not name.startswith("_")]
    here["__all__"] = list(dict.fromkeys([*here.get("__all__", own), *homes, *refusals]))
    here["__dir__"] = lambda: sorted({*here, *here["__all__"], *_below(path)})
    here.setdefault("__getattr__", find)
    for name, (home, _) in homes.items():
        if home == f"{module.__name__}.{name}":  # else importing that module would put it in the place of the name
            find(name)
    return find


def _below(path: str) -> list[str]:
    """Names of the modules directly below one, as far as they are told of."""
    return [last for parent, _, last in (module.rpartition(".") for module in _MODULES) if parent == path]


def canonical(fullname: str) -> str:
    """The one name under which a module runs, for `deepspeed.<path>` and aliases; any other name as it is."""
    top, _, path = fullname.removeprefix("trilithon.compat.").partition(".")
    if top != NAME or not path:
        return fullname
    for alias, module in names.ALIASES.items():
        if f"{path}.".startswith(f"{alias}."):
            path = module + path[len(alias) :]
    return f"{ROOT}.{path}"


class Finder:
    """Finds modules below the package, and the same ones below `deepspeed`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{NAME}.") and sys.modules.get(NAME) is not sys.modules.get(ROOT):
            return None  # DeepSpeed's own
        if canonical(fullname) != fullname:
            return _again(fullname)
        if not fullname.startswith(f"{ROOT}."):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            path_here = fullname.removeprefix(f"{ROOT}.")
            if path_here not in _MODULES:
                return None
            spec = ModuleSpec(fullname, None, origin=names.__file__, is_package=bool(_below(path_here)))
            spec.has_location = True
        loader: Any = _Filled(spec.loader)
        spec.loader = loader
        return spec


def _again(fullname: str) -> ModuleSpec | None:
    """A module under another name than its own."""
    try:
        found = importlib.util.find_spec(canonical(fullname))
    except ModuleNotFoundError:
        found = None
    if found is not None:
        same: Any = _Same(found)
        return ModuleSpec(fullname, same, origin=found.origin, is_package=found.submodule_search_locations is not None)
    if fullname.startswith(f"{NAME}."):
        try:  # a part that is not here says so, and what to use; for any other name the import fails as usual
            getattr(sys.modules[ROOT], fullname.split(".")[1])
        except AttributeError as error:
            raise ModuleNotFoundError(str(error), name=fullname) from None
    return None


class _Filled:
    """Runs a module's file, if there is one, and adds what is told of it."""

    def __init__(self, code: Any) -> None:
        self._code = code

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if self._code is not None:
            self._code.exec_module(module)
        fill(module)

    def get_code(self, fullname: str) -> Any:
        """For `python -m`: a module that is only told of runs its `main`."""
        run = compile(f"from {fullname} import main; main()", names.__file__, "exec")
        return self._code.get_code(fullname) if self._code is not None else run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._code, name)  # what else a loader can do


class _Same:
    """A module that is there under its own name, under another one."""

    def __init__(self, found: ModuleSpec) -> None:
        self._found = found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(self._found.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._found  # importlib has put the other name's there; it runs under its own

    def get_code(self, fullname: str) -> Any:
        """For `python -m deepspeed.<path>`."""
        loader: Any = self._found.loader
        return loader.get_code(self._found.name)


def install() -> None:
    """Once in a process."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
