"""Which engine trains a parameter, and which one is the newest: DeepSpeed's functions are not told."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from trilithon.engine.engine import Engine

_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> (weak reference to its engine, its name there)
_NEWEST: list[weakref.ref[Engine]] = []


def register(engine: Engine) -> None:
    """From now on the engine is found by its parameters, and is the newest."""
    reference = weakref.ref(engine)
    _NEWEST[:] = [reference]
    for name, param in engine.module.named_parameters():
        _OF[param] = (reference, name)


def unregister(engine: Engine) -> None:
    for param in engine.module.parameters():
        if engine_of(param)[0] is engine:
            _OF.pop(param, None)
    if newest() is engine:
        _NEWEST.clear()


def engine_of(param: Tensor) -> tuple[Engine | None, str]:
    """(the engine that trains a parameter, the parameter's name there); (None, "") for any other tensor."""
    reference, name = _OF.get(param, (lambda: None, ""))
    return reference(), name


def newest() -> Engine | None:
    """The engine that was made last, while there is one."""
    return _NEWEST[0]() if _NEWEST else None
