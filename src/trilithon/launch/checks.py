"""What is refused before anything starts: a script, module or program that is not there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from trilithon.errors import LaunchError
from trilithon.launch.plan import Command


def check_command(command: Command) -> None:
    """Raises LaunchError if what every rank would run does not exist here. Imports nothing of the user's."""
    if command.kind == "program":
        if shutil.which(command.target) is None:
            raise LaunchError(
                f"program {command.target!r} was not found or may not be executed. Check the name and PATH."
            )
    elif command.kind == "module":
        top = command.target.split(".")[0]
        sys.path.insert(0, os.getcwd())
        try:
            found = bool(top) and importlib.util.find_spec(top) is not None
        except (ValueError, ImportError):
            found = top in sys.modules
        finally:
            sys.path.pop(0)
        if not found:
            raise LaunchError(f"module {command.target!r} was not found. Start in its folder, or install it.")
    else:
        _check_script(Path(command.target))


def _check_script(path: Path) -> None:
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise LaunchError(f"{path} is a folder without __main__.py. Name the script inside it.")
    elif not path.exists():
        raise LaunchError(
            f"script {path} does not exist (looked in {Path.cwd()}). Check the path; for a module use --module, for a "
            "program --no-python."
        )
    elif not os.access(path, os.R_OK):
        raise LaunchError(f"script {path} may not be read. Change its permissions.")
