"""Modules and names of DeepSpeed, made of what `names` tells of them when they are first asked for.

Importing the package therefore costs nothing and touches no device. A module is a file at its path here, told of in
`names`, or both. Under the name `deepspeed` (see `stand_in`) and under an alias it is the same module again.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from trilithon.compat.deepspeed import names
from trilithon.compat.deepspeed.names import ROOT
from trilithon.compat.deepspeed.refused import refused

NAME = "deepspeed"
_ELSE = "docs/compat.md lists the names that are there, and our own ones for the rest."


class MissingNameError(AttributeError):
    """A name of DeepSpeed that is not here; the message says what to use instead."""


def _read() -> tuple[dict[str, dict[str, tuple[str, str]]], dict[str, dict[str, str]], dict[str, set[str]]]:
    """Of each module: where names are (module, name), why names are refused, and the modules directly below it."""
    homes: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    refusals: dict[str, dict[str, str]] = defaultdict(dict)
    for line in names.HOMES.split("\n")[1:-1]:
        module, home, *words = line.split()
        for name, _, other in (word.partition("=") for word in words):
            homes[module.strip(".")][name] = (ROOT + home if home.startswith(".") else home, other or name)
    for paragraph in names.REFUSED.replace("\n    ", " | ").split("\n")[1:-1]:
        head, *way = paragraph.split(" | ")
        module, *words = head.split()
        refusals[module.strip(".")].update(dict.fromkeys(words, " ".join(way)))
    below: dict[str, set[str]] = defaultdict(set)
    for module in (*names.ALIASES, *homes, *refusals, *names.VALUES):
        while module:
            module, _, last = module.rpartition(".")  # noqa: PLW2901
            below[module].add(last)
    return homes, refusals, below


_HOMES, _REFUSED, _BELOW = _read()


def fill(module: ModuleType) -> Callable[[str], Any]:
    """Give a module what is told of it. Returns its `__getattr__` (PEP 562)."""
    path = module.__name__.removeprefix(ROOT).removeprefix(".")
    homes, refusals, shown = _HOMES.get(path, {}), _REFUSED.get(path, {}), f"{path}." if path else ""

    def find(name: str) -> Any:
        if name in homes:
            home, other = homes[name]
            value = getattr(import_module(home), other)
        elif name in refusals:
            value = refused(shown + name, refusals[name])
        elif not name.startswith("_") and hasattr(module, "__path__") and _is_module(f"{module.__name__}.{name}"):
            value = import_module(f"{module.__name__}.{name}")
        else:
            way = names.INSTEAD.get(shown + name) or names.INSTEAD.get(f"{shown}*") or _ELSE
            raise MissingNameError(f"{NAME}.{shown}{name} does not exist here. {way}")
        setattr(module, name, value)
        return value

    here = vars(module)
    here.update(names.VALUES.get(path, {}))
    own = [name for name in here if not name.startswith("_")]
    here["__all__"] = list(dict.fromkeys([*here.get("__all__", own), *homes, *refusals]))
    here["__dir__"] = lambda: sorted({*here, *here["__all__"], *_BELOW.get(path, ())})
    here.setdefault("__getattr__", find)
    for name, (home, _) in homes.items():
        if home == f"{module.__name__}.{name}":  # else importing that module would put it in the place of the name
            find(name)
    return find


def _is_module(fullname: str) -> bool:
    return importlib.util.find_spec(fullname) is not None


def canonical(fullname: str) -> str:
    """The one name under which a module runs, for `deepspeed.<path>` and aliases; any other name as it is."""
    top, _, path = fullname.removeprefix("trilithon.compat.").partition(".")
    if top != NAME or not path:
        return fullname
    for alias, module in names.ALIASES.items():
        if f"{path}.".startswith(f"{alias}."):
            path = module + path[len(alias) :]
    return f"{ROOT}.{path}"


class Finder(MetaPathFinder):
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
            parent, _, last = fullname.removeprefix(f"{ROOT}.").rpartition(".")
            if last not in _BELOW.get(parent, ()):
                return None
            spec = ModuleSpec(fullname, None, origin=names.__file__, is_package=True)
            spec.has_location = True
        spec.loader = _Filled(spec.loader)
        return spec


def _again(fullname: str) -> ModuleSpec | None:
    """A module under another name than its own."""
    try:
        found = importlib.util.find_spec(canonical(fullname))
    except ModuleNotFoundError:
        found = None
    if found is not None:
        package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _Same(found), origin=found.origin, is_package=package)
    if fullname.startswith(f"{NAME}."):
        try:  # a part that is not here says so, and what to use; for any other name the import fails as usual
            getattr(sys.modules[ROOT], fullname.split(".")[1])
        except AttributeError as error:
            raise ModuleNotFoundError(str(error), name=fullname) from None
    return None


class _Filled(Loader):
    """Runs a module's file, if there is one, and adds what is told of it."""

    def __init__(self, code: Any) -> None:
        self._code = code

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if self._code is not None:
            self._code.exec_module(module)
        fill(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._code, name)  # what else a loader can do: source, code


class _Same(Loader):
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

    def get_source(self, fullname: str) -> str | None:
        return Path(self._found.origin).read_text(encoding="utf-8") if self._found.origin else None


def install() -> None:
    """Once in a process."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
