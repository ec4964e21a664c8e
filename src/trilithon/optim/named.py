"""A torch optimizer object for an update rule of the configuration.

Whoever wants a `torch.optim.Optimizer` to hold (a scheduler, a program that edits `param_groups`) gets one, and an
engine that it is passed to runs the rule; it may be cut over ranks and keep its state elsewhere like any other. Without
an engine it is an ordinary optimizer: `step()` runs the same rule over whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trilithon.config.optimizer import OptimizerConfig
from trilithon.contracts import ReduceOp, Shard, Slice, Update
from trilithon.errors import ProtocolError
from trilithon.optim.build import make_update
from trilithon.optim.groups import Group

_COMMUNICATES = ("onebit_adam", "onebit_lamb", "zero_one_adam", "apmsqueeze")


class Named(torch.optim.Optimizer):
    """section: of the configuration, such as `AdamW(lr=1e-3)`; its settings are the defaults of the groups in `params`.

    `kind` and `model_dump` make it an optimizer section itself, wherever one is asked what it is called.
    """

    def __init__(self, params: Iterable[Any], section: OptimizerConfig) -> None:
        self.section = section
        self._alone: _Alone | None = None
        self._taken = False
        super().__init__(params, {key: value for key, value in section.model_dump().items() if key != "kind"})

    @property
    def kind(self) -> str:
        return self.section.kind

    def model_dump(self) -> dict[str, Any]:
        return self.section.model_dump()

    def take_over(self) -> None:
        """An engine makes the steps from now on. Raises ProtocolError if some were made without one."""
        if self._alone is not None and self._alone.updates:
            raise ProtocolError(
                f"this {type(self).__name__} has already made {self._alone.updates} steps without an engine. Pass a "
                "fresh one; to continue a run, load a checkpoint through the engine."
            )
        self._taken = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of whole parameters from their `grad`. Raises ProtocolError where an engine makes the steps."""
        if self._taken:
            raise ProtocolError(
                f"{type(self).__name__}.step() would change nothing: an engine holds the gradients and updates the "
                "parameters. Call engine.step() instead."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._alone is None:
            self._alone = _Alone(self)
        self._alone.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        if self._alone is not None:
            self._alone.show()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if not self._taken:
            self._alone = self._alone or _Alone(self)
            self._alone.take()


class _Alone:
    """The rule of a `Named` over whole parameters of one process."""

    def __init__(self, optimizer: Named) -> None:
        if optimizer.kind in _COMMUNICATES:
            raise ProtocolError(f"{type(optimizer).__name__} communicates, and makes steps inside an engine only.")
        self._optimizer = optimizer
        self.updates = 0
        self._slices: dict[Tensor, Slice] = {}
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            names = [f"{index}.{position}" for position in range(len(group["params"]))]
            groups.append(Group(names, group))
            for name, param in zip(names, group["params"]):
                self._slices[param] = _whole(name, index, param)
        names = [name for group in groups for name in group.names]
        self._update: Update = make_update(optimizer.section, groups, names, whole=True)

    @torch.no_grad()
    def step(self) -> None:
        idle = frozenset(s.shards[0].name for param, s in self._slices.items() if param.grad is None)
        for param, slice_ in self._slices.items():
            slice_.idle = idle
            if param.grad is not None:
                slice_.grad = param.grad.detach().to(slice_.master.dtype).reshape(-1)
        self.updates += 1
        self._update.apply(self.updates, list(self._slices.values()), 1.0, _nothing, _as_it_is)

    def show(self) -> None:
        """State as torch.optim shows it: by parameter, in its shape."""
        for param, slice_ in self._slices.items():
            with self._update.state(slice_) as state:
                found = {key: value.view(param.shape) for key, value in state.items() if key != "master"}
            if self.updates:
                self._optimizer.state[param] = {"step": torch.tensor(float(self.updates)), **found}

    def take(self) -> None:
        """The inverse, after the optimizer's `load_state_dict`."""
        for param, slice_ in self._slices.items():
            shown = self._optimizer.state.get(param)
            if not shown:
                continue
            self.updates = max(self.updates, int(shown["step"]))
            with self._update.state(slice_, write=True) as state:
                for key, value in state.items():
                    if key in shown:
                        value.copy_(shown[key].reshape(-1))
        self._update.load_state_dict({**self._update.state_dict(), "updates": self.updates})


def _whole(name: str, group: int, param: Tensor) -> Slice:
    """A whole parameter as one slice; below fp32 it gets a master of its own."""
    flat = param.detach().view(-1)
    low = flat if param.dtype in (torch.float16, torch.bfloat16) else None
    shard = Shard(name, 0, param.numel(), 0, param.shape)
    master = flat if low is None else flat.float()
    return Slice(name, group, master, torch.empty(0, device=param.device), low, [shard])


def _nothing(_: Slice) -> None:
    """There is nobody to send new values to."""


def _as_it_is(local: Tensor, _: ReduceOp) -> Tensor:
    return local
