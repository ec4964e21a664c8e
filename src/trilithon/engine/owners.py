"""Which engine trains a parameter, for functions that are handed the parameter alone.

    engine, name = engine_of(model.head.weight)
    moment = engine.view(name, "exp_avg")

An engine is known from when it is made until it is closed, and nothing here keeps it alive.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from trilithon.engine.engine import Engine

_OF: Any = WeakIdKeyDictionary()  # parameter -> (weak reference to its engine, its name there)
_NEWEST: list[weakref.ref[Engine]] = []


def engine_of(param: Tensor) -> tuple[Engine | None, str]:
    """(the engine that trains a parameter, the parameter's name there); (None, "") for any other tensor."""
    reference, name = _OF.get(param, (lambda: None, ""))
    return reference(), name


def newest() -> Engine | None:
    """The engine that was made last, while there is one and it is open."""
    return _NEWEST[0]() if _NEWEST else None


def register(engine: Engine) -> None:
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
