"""Parameter groups with names: which parameters share settings, with the settings themselves kept live.

A group reads like the dictionaries of torch.optim (`group["lr"]`), but its "params" are names, because the tensors they
name may be cut over ranks. Settings are never copied: writing `group["lr"]` writes the user's own dictionary, and an
edit there (by a scheduler, say) is seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from trilithon.errors import ConfigError


@runtime_checkable
class OptimizerSettings(Protocol):
    """What an optimizer section of the configuration offers."""

    @property
    def kind(self) -> Any: ...

    def model_dump(self) -> dict[str, Any]: ...


@runtime_checkable
class Declared(Protocol):
    """A torch optimizer that says which update rule of ours it stands for (`optim.named.Named`)."""

    section: OptimizerSettings

    def take_over(self) -> None:
        """From now on an engine makes the steps."""
        ...


Factory = Callable[[Any], torch.optim.Optimizer]
AnyOptimizer = torch.optim.Optimizer | OptimizerSettings | Factory


class Group(MutableMapping[str, Any]):
    """One parameter group: the names of its trainable parameters, and its settings.

    settings: the live dictionary, without meaning for its own "params" entry. optimizer: who owns it, if anyone does.
    """

    def __init__(
        self, names: Iterable[str], settings: dict[str, Any], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.names = list(names)
        self.settings = settings
        self.optimizer = optimizer

    def __getitem__(self, key: str) -> Any:
        return self.names if key == "params" else self.settings[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise TypeError('the "params" of a group are fixed once the engine has laid them out')
        self.settings[key] = value

    def __delitem__(self, key: str) -> None:
        del self.settings[key]

    def __iter__(self) -> Iterator[str]:
        return iter({"params": None, **self.settings})

    def __len__(self) -> int:
        return len({"params": None, **self.settings})

    def __repr__(self) -> str:
        settings = {key: value for key, value in self.settings.items() if key != "params"}
        return f"Group({len(self.names)} parameters, {settings})"


def groups_of(
    model: nn.Module | Iterable[tuple[str, nn.Parameter]],
    optimizer: AnyOptimizer,
    parameters: Iterable[Any] | None = None,
) -> list[Group]:
    """The parameter groups of `optimizer` over the trainable parameters of `model`, by name.

    model: the module, or its (name, parameter) pairs. optimizer: a torch optimizer over the model's parameters, whose
    groups are taken as they are; or an optimizer section of the configuration; or a class or function that makes an
    optimizer from parameters. parameters, for the last two: tensors, or dictionaries with "params" and settings of
    their own; all trainable parameters form one group if it is not given.
    Frozen parameters are left out. Raises ConfigError for tensors that the model does not have, or has twice.
    """
    pairs = list(model.named_parameters() if isinstance(model, nn.Module) else model)
    names = {id(parameter): name for name, parameter in pairs}
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = _as_groups(parameters) if parameters is not None else [{"params": [p for _, p in pairs]}]
        trainable = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in given]
        if isinstance(optimizer, OptimizerSettings):
            defaults = {key: value for key, value in optimizer.model_dump().items() if key != "kind"}
            return _named([{**defaults, **group} for group in trainable], names, None)
        made = optimizer(trainable if parameters is not None else trainable[0]["params"])
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer={optimizer!r} returned a {type(made).__name__}; pass a torch.optim.Optimizer, or a class "
                "or function that makes one from parameters."
            )
        optimizer = made
    elif parameters is not None:
        raise ConfigError("Both an optimizer with its own groups and `parameters` were given; leave `parameters` out.")
    return _named(optimizer.param_groups, names, optimizer)


def _as_groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    entries = list(parameters)
    if entries and all(isinstance(entry, dict) for entry in entries):
        return [{**entry, "params": _listed(entry["params"])} for entry in entries]
    return [{"params": entries}]


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _named(groups: list[dict[str, Any]], names: dict[int, str], optimizer: torch.optim.Optimizer | None) -> list[Group]:
    seen: dict[str, int] = {}
    result = []
    for index, group in enumerate(groups):
        mine = []
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                raise ConfigError(
                    f"Tensor {position} of parameter group {index} (shape {tuple(parameter.shape)}) is not a parameter "
                    "of the model. Build the optimizer from model.parameters() of the model given to initialize, after "
                    "it was moved or converted."
                )
            if name in seen:
                raise ConfigError(
                    f"Parameter {name!r} is in groups {seen[name]} and {index}; list it in one group, once."
                )
            seen[name] = index
            if parameter.requires_grad:
                mine.append(name)
        settings = group if optimizer is not None else {key: value for key, value in group.items() if key != "params"}
        result.append(Group(mine, settings, optimizer))
    return result
