"""What DeepSpeed's stage 3 hangs on a model, as far as programs reach for it: hooks, external parameters, generation.

Our hooks leave alone what is whole already, so that none has to be removed for generation: their lists are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from trilithon import zero
from trilithon.compat.deepspeed.runtime.zero.parameter_attributes import forget, note
from trilithon.compat.deepspeed.runtime.zero.partition_parameters import GatheredParameters, external_parameters
from trilithon.engine.engine import Engine
from trilithon.engine.owners import engine_of

_METHODS: dict[str, Callable[[nn.Module], Iterable[tuple[str, nn.Parameter]]]] = {  # of every module of an engine
    "ds_external_parameters": lambda module: external_parameters(module).items(),
    "all_parameters": lambda module: [*module.named_parameters(recurse=False), *external_parameters(module).items()],
}


def adopt(engine: Engine) -> None:
    """A new engine: its parameters get the attributes of stage 3 if that is its stage."""
    if engine.config.zero.stage == 3:
        for param in engine.module.parameters():
            note(param)
        for module in engine.module.modules():
            zero.allow_unaware(module)
            for name, method in _METHODS.items():
                object.__setattr__(module, name, partial(method, module))


def release(engine: Engine) -> None:
    """The engine is closed: parameters and modules are as they were, unless another one has them by now."""
    if engine_of(engine.module)[0] not in (engine, None):
        return
    forget([param for param in engine.module.parameters() if engine_of(param)[0] in (engine, None)])
    for module in engine.module.modules():
        zero.allow_unaware(module, allow=False)
        for name in _METHODS:
            vars(module).pop(name, None)


class DeepSpeedZeRoOffload:
    """`engine.optimizer.parameter_offload` (or `engine.optimizer` of an engine that only runs forwards)."""

    def __init__(self, module: nn.Module, *_args: Any, **_kwargs: Any) -> None:
        self.module = module
        self.forward_hooks: list[RemovableHandle] = []
        self.backward_hooks: list[RemovableHandle] = []

    param_coordinator = property(lambda self: self)  # the order of gathers, recorded anew by itself when it changes

    def is_invalid_trace(self) -> bool:
        return True

    def _nothing_to_do(self, *_: Any) -> None:
        """Hooks are in place as long as the engine is, and what was gathered is freed after its use."""

    _invalidate_trace = _register_deepspeed_module = empty_partition_cache = _nothing_to_do


@contextmanager
def unwrap_model_for_generation(engine: Any) -> Iterator[nn.Module]:
    """The plain module with all its parameters whole, for generate() with different lengths on the ranks."""
    with GatheredParameters(engine.module.parameters()):
        yield engine.module
