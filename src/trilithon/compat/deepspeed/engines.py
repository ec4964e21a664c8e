"""Which engine trains a parameter, and which one is the newest: DeepSpeed's functions are not told."""

from __future__ import annotations

import weakref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from trilithon.engine.engine import Engine

_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter or model -> (weak reference to its engine, name there)
_NEWEST: list[weakref.ref[Engine]] = []


def register(engine: Engine) -> None:
    """From now on the engine is found by its parameters, and is the newest."""
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


def engine_of(trained: Tensor | nn.Module) -> tuple[Engine | None, str]:
    """(the engine that trains a parameter or a whole model, its name there); (None, "") for anything else."""
    reference, name = _OF.get(trained, (lambda: None, ""))
    return reference(), name


def newest() -> Engine | None:
    """The engine that was made last, while there is one."""
    return _NEWEST[0]() if _NEWEST else None
