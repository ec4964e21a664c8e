"""What `deepspeed.initialize` returns as the optimizer: a view of the engine's, with live parameter groups.

Groups are those of the torch optimizer underneath, so a rate written on either side is the rate of the next step.
Classes are told apart by name only, for programs that ask `isinstance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trilithon.compat.deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

if TYPE_CHECKING:
    from trilithon.compat.deepspeed.runtime.engine import DeepSpeedEngine


class DeepSpeedOptimizer:
    """engine: whose updates it stands for; optimizer: the torch optimizer with the groups."""

    def __init__(self, engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer) -> None:
        self._engine = engine
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    state = property(attrgetter("optimizer.state"))
    defaults = property(attrgetter("optimizer.defaults"))
    overflow = property(attrgetter("_engine.overflowed"), doc="The last step was left out: a gradient was not finite.")
    loss_scale = cur_scale = property(attrgetter("_engine.native.loss_scale"))
    dynamic_loss_scale = property(lambda self: self._engine.dynamic_loss_scale())

    def step(self, closure: Any = None) -> None:
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad()

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """As `engine.backward` of a loss that is divided already."""
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the optimizer's state and of the fp32 weights."""
        return self._engine.native.own_state()

    def load_state_dict(self, state_dict: Mapping[str, Any], *_args: Any, **_kwargs: Any) -> None:
        """What `state_dict` of the same rank returned, for as many ranks. Collective."""
        self._engine.native.load_own_state(state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class ZeROOptimizer(DeepSpeedOptimizer):
    """Of stages 1 to 3."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Of stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Of stage 3."""

    @cached_property
    def parameter_offload(self) -> DeepSpeedZeRoOffload:
        return DeepSpeedZeRoOffload(self._engine.module)


class FP16_Optimizer(DeepSpeedOptimizer):
    """Of stage 0 in fp16, or in bf16."""


class FP16_UnfusedOptimizer(FP16_Optimizer):
    """The same: one implementation serves all."""


class BF16_Optimizer(ZeROOptimizer):
    """Of bf16 with gradients added up in fp32."""


OF_STAGE = (FP16_UnfusedOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
