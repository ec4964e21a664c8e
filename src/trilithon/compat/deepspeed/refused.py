"""Names of DeepSpeed that have no counterpart here: they can be imported and compared with, and say why when used."""

from __future__ import annotations

from typing import Any, NoReturn


class RefusedError(NotImplementedError):
    """A name of DeepSpeed was used that trilithon does not have; the message names what to use instead."""


def refused(name: str, way: str) -> type:
    """A class called `name` that raises RefusedError, with the way out, when it is made or called."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RefusedError(f"deepspeed.{name} does not exist here. {way}")

    short = name.rpartition(".")[2]
    return type(short, (), {"__new__": refuse, "__doc__": f"Not here. {way}"})
