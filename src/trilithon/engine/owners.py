"""Which engine trains a parameter, for functions that are handed nothing else.

    engine, name = engine_of(model.head.weight)
    moment = dict(engine.view("exp_avg", name))[name]

An engine is known from when it is made until it is closed, and nothing here keeps it alive.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from trilithon.engine.engine import Engine

_OF: Any = WeakIdKeyDictionary()  # parameter or model -> (weak reference to its engine, name there)
_NEWEST: list[weakref.ref[Engine]] = []


def engine_of(trained: Tensor | nn.Module) -> tuple[Engine | None, str]:
    """(the engine that trains a parameter or a whole model, its name there); (None, "") for anything else."""
    reference, name = _OF.get(trained, (lambda: None, ""))
    return reference(), name


def newest() -> Engine | None:
    """The engine that was made last, while there is one and it is open."""
    return _NEWEST[0]() if _NEWEST else None


def register(engine: Engine) -> None:
    reference = weakref.ref(engine)
    _NEWEST[:] = [reference]
    for name, one in [("", engine.module), *engine.module.named_parameters()]:
        _OF[one] = (reference, name)


def unregister(engine: Engine) -> None:
    trained: list[Tensor | nn.Module] = [engine.module, *engine.module.parameters()]
    for one in trained:
        if engine_of(one)[0] is engine:
            _OF.pop(one, None)
    if newest() is engine:
        _NEWEST.clear()
