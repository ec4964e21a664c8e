"""Names that are looked up on first use, so that importing the package costs nothing and touches no device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

ROOT = "trilithon.compat.deepspeed"


class MissingNameError(AttributeError):
    """A name of DeepSpeed that is not here; the message says what to use instead."""


def resolver(
    package: str, homes: Mapping[str, str], modules: Collection[str] = (), instead: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562).

    homes: name -> the module below `trilithon.compat.deepspeed` that has it, "module:name" where it is called otherwise
    there. modules: submodules of `package`. instead: name -> what to say of a name that is not here.
    """

    def find(name: str) -> Any:
        if name in homes:
            home, _, other = homes[name].partition(":")
            value = getattr(import_module(f"{ROOT}.{home}" if home else ROOT), other or name)
        elif name in modules:
            value = import_module(f"{package}.{name}")
        else:
            shown = f"deepspeed{package.removeprefix(ROOT)}.{name}"
            way = (instead or {}).get(
                name, "docs/compat.md lists the names that are there, and our own ones for the rest."
            )
            raise MissingNameError(f"{shown} does not exist here. {way}")
        setattr(sys.modules[package], name, value)
        return value

    return find
