"""The module `deepspeed` is this package: its names, its modules and no copy of them.

`stand_in()` puts the package under the name `deepspeed` and answers imports below it with the modules of the same path
here. It is called by the module `deepspeed` itself, which comes from the distribution in `shim/`, or from the folder
`on_path` beside this file when a program is started by `python -m trilithon.compat.deepspeed`, `trilithon launch
--deepspeed` or the `deepspeed` command.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

NAME, HERE = "deepspeed", "trilithon.compat.deepspeed"
ON_PATH = Path(__file__).parent / "on_path"
MARK = "trilithon.compat.deepspeed"  # in every `deepspeed/__init__.py` of ours


def environment() -> dict[str, str]:
    """PYTHONPATH with which a process, and what it starts, finds the module and its metadata."""
    before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(ON_PATH)]
    return {"PYTHONPATH": os.pathsep.join([str(ON_PATH), *before])}


def stand_in(*, installed: bool = False) -> ModuleType:
    """Make `deepspeed` this package, in this process. installed: it is the distribution, which has to be the only one.

    Raises ImportError when DeepSpeed itself is installed too, or was imported before.
    """
    package = sys.modules.get(NAME)
    if package is not None and getattr(package, "__spec__", None) is not None and not _is_ours(package):
        raise ImportError(f"the module {NAME} of {package.__file__} was imported before. Start anew without it.")
    if installed:
        _refuse_beside_another()
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    sys.modules[NAME] = module = importlib.import_module(HERE)
    return module


def _is_ours(package: ModuleType) -> bool:
    if package.__name__ == HERE:
        return True
    return package.__file__ is not None and _file_is_ours(Path(package.__file__))


def _file_is_ours(path: Path) -> bool:
    try:
        return MARK in path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _refuse_beside_another() -> None:
    others = [found for found in importlib.metadata.distributions(name=NAME) if "trilithon" not in found.version]
    files = [Path(folder or ".") / NAME / "__init__.py" for folder in sys.path]
    foreign = [path for path in files if path.is_file() and not _file_is_ours(path)]
    if others or foreign:
        what = f"DeepSpeed {others[0].version}" if others else str(foreign[0].parent)
        raise ImportError(
            f"trilithon's stand-in for DeepSpeed is installed beside {what}. Keep one: `pip uninstall deepspeed` until "
            "none is left, then install the one that you want. Without installing anything, `python -m "
            f"{HERE} script.py` uses trilithon for one program."
        )


class _Finder(MetaPathFinder, InspectLoader):
    """Answers for `deepspeed.<path>` with the module of that path here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(NAME + "."):
            return None
        found = _spec(fullname)
        if found is None:
            _say_instead(fullname)
            return None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_name_here(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = (
            module.__spec__.loader_state
        )  # importlib has put the other name's there; it runs under its own

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m deepspeed.<path>`."""
        found = _spec(fullname)
        loader = found.loader if found is not None else None
        return loader.get_code(_name_here(fullname)) if isinstance(loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        found = _spec(fullname)
        return Path(found.origin).read_text(encoding="utf-8") if found is not None and found.origin else None


def _say_instead(fullname: str) -> None:
    """A part of DeepSpeed that is not here says so, and what to use; for any other name the import fails as usual."""
    top = fullname.split(".")[1]
    try:
        getattr(importlib.import_module(HERE), top)
    except AttributeError as error:
        raise ModuleNotFoundError(str(error), name=fullname) from None


def _name_here(fullname: str) -> str:
    return HERE + fullname.removeprefix(NAME)


def _spec(fullname: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(_name_here(fullname))
    except ModuleNotFoundError:
        return None
