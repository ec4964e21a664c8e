"""What DeepSpeed's stage 3 hangs on a model, as far as programs reach for it: hooks, external parameters, generation.

Our hooks gather whatever a forward uses and leave alone what is whole already, so that generation under
`GatheredParameters` needs none of them to be removed: the lists of hooks here are empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from trilithon import zero
from trilithon.compat.deepspeed.runtime.zero.parameter_attributes import forget, note
from trilithon.compat.deepspeed.runtime.zero.partition_parameters import GatheredParameters, external_parameters
from trilithon.engine.engine import Engine
from trilithon.engine.owners import engine_of


def adopt(engine: Engine) -> None:
    """A new engine: its parameters get the attributes of stage 3 if that is its stage."""
    if engine.config.zero.stage == 3:
        for param in engine.module.parameters():
            note(param)
        for module in engine.module.modules():
            zero.allow_unaware(module)
            object.__setattr__(module, "ds_external_parameters", partial(_external, module))
            object.__setattr__(module, "all_parameters", partial(_all_parameters, module))


def release(engine: Engine) -> None:
    """The engine is closed: parameters and modules are as they were."""
    forget([param for param in engine.module.parameters() if engine_of(param)[0] is engine])
    for module in engine.module.modules():
        zero.allow_unaware(module, allow=False)
        for name in ("ds_external_parameters", "all_parameters"):
            vars(module).pop(name, None)


def _external(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return iter(external_parameters(module).items())


def _all_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return itertools.chain(module.named_parameters(recurse=False), _external(module))


class DeepSpeedZeRoOffload:
    """`engine.optimizer.parameter_offload` (or `engine.optimizer` of an engine that only runs forwards)."""

    def __init__(self, module: nn.Module, *_args: Any, **_kwargs: Any) -> None:
        self.module = module
        self.forward_hooks: list[RemovableHandle] = []
        self.backward_hooks: list[RemovableHandle] = []

    def get_param_coordinator(self) -> Self:
        """The order of gathers, which is recorded anew by itself when it changes."""
        return self

    param_coordinator = property(get_param_coordinator)

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
