"""Names of DeepSpeed that have no counterpart here: they can be imported and compared with, and say why when used."""

from __future__ import annotations

from typing import Any, NoReturn


class RefusedError(NotImplementedError):
    """A name of DeepSpeed was used that trilithon does not have; the message names what to use instead."""


class _Refused(type):
    """The class of such names: making one raises, and so does asking for one of its own methods."""

    _why = ""

    def __call__(cls, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RefusedError(cls._why)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise RefusedError(cls._why)


def refused(name: str, way: str) -> type:
    """A class called `name` that raises RefusedError, with the way out, when it is made or called."""
    why = f"deepspeed.{name} does not exist here. {way}"
    return _Refused(name.rpartition(".")[2], (), {"_why": why, "__doc__": f"Not here. {way}"})
