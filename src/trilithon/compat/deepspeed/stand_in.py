"""The module `deepspeed` is this package: its names, its modules and no copy of them.

`stand_in()` puts the package under the name `deepspeed`, below which `resolve` finds its modules. It is called by the
module `deepspeed` itself, which comes from the distribution in `shim/`, or from the folder `on_path` beside this file
when a program is started by `python -m trilithon.compat.deepspeed`, `trilithon launch --deepspeed` or `deepspeed`.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from types import ModuleType

from trilithon.compat.deepspeed.names import ROOT
from trilithon.compat.deepspeed.resolve import NAME

HERE = ROOT
ON_PATH = Path(__file__).parent / "on_path"
MARK = ROOT  # in every `deepspeed/__init__.py` of ours


def environment() -> dict[str, str]:
    """PYTHONPATH with which a process, and what it starts, finds the module and its metadata."""
    before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(ON_PATH)]
    return {"PYTHONPATH": os.pathsep.join([str(ON_PATH), *before])}


def stand_in(*, installed: bool = False) -> ModuleType:
    """Make `deepspeed` this package, in this process. installed: it is the distribution, which has to be the only one.

    Raises ImportError when DeepSpeed itself is installed too, or was imported before.
    """
    package, here = sys.modules.get(NAME), sys.modules[HERE]
    if package is not None and package.__spec__ is not None and not _is_ours(package.__file__):
        raise ImportError(f"the module {NAME} of {package.__file__} was imported before. Start anew without it.")
    if installed:
        _refuse_beside_another()
    sys.modules[NAME] = here
    return here


def _is_ours(file: str | Path | None) -> bool:
    try:
        return file is not None and MARK in Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _refuse_beside_another() -> None:
    others = [found for found in importlib.metadata.distributions(name=NAME) if "trilithon" not in found.version]
    files = [Path(folder or ".") / NAME / "__init__.py" for folder in sys.path]
    foreign = [path for path in files if path.is_file() and not _is_ours(path)]
    if others or foreign:
        what = f"DeepSpeed {others[0].version}" if others else str(foreign[0].parent)
        raise ImportError(
            f"trilithon's stand-in for DeepSpeed is installed beside {what}. Keep one: `pip uninstall deepspeed` until "
            "none is left, then install the one that you want. Without installing anything, `python -m "
            f"{HERE} script.py` uses trilithon for one program."
        )
