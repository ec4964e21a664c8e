"""Optimizers by DeepSpeed's names and arguments, as sections of our configuration.

Alone they are torch optimizers; an engine runs their rule over slices, and their state rests where offload says. So the
classes "for the CPU" have the same rule as the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import Parameter, Signature
from typing import Any, ClassVar, Self

from trilithon.config import Section
from trilithon.config.optimizer import Adagrad, Adam, AdamW, Lamb, Lion, OptimizerConfig
from trilithon.optim.named import Named

# Arguments that have one value here, and what to do instead of giving them another one.
_FIXED = {
    "amsgrad": (False, "is not supported. Pass torch.optim.AdamW(amsgrad=True)."),
    "fp32_optimizer_states": (True, "is not in this version. State is always fp32."),
    "eps_inside_sqrt": (False, "is not in this version. eps is added outside the root."),
    "max_grad_norm": (0.0, "is not in this version. Write gradient_clipping in the configuration."),
}
_OURS = {"max_coeff": "max_ratio", "min_coeff": "min_ratio"}  # fields of a section that have another name there


class ByName(Named):
    """A named optimizer that can also be made from a section that was read already."""

    @classmethod
    def of(cls, params: Iterable[Any], section: OptimizerConfig) -> Self:
        made = cls.__new__(cls)
        Named.__init__(made, params, section)
        return made


class _WithArguments(ByName):
    """One whose constructor has DeepSpeed's arguments. Raises RuntimeError for values that no rule here has."""

    __signature__: ClassVar[Signature]
    _section: ClassVar[type[Section]]

    def __init__(self, *args: Any, **settings: Any) -> None:
        bound = self.__signature__.bind(*args, **settings)
        bound.apply_defaults()
        (_, params), *pairs = bound.arguments.items()
        given = {_OURS.get(key, key): value for key, value in pairs if key != "set_grad_none"}
        for key, (value, instead) in _FIXED.items():
            if given.pop(key, value) != value:
                raise RuntimeError(f"{type(self).__name__}: {key} other than {value} {instead}")
        decoupled = given.pop("adam_w_mode", True) and given.pop("adamw_mode", True)
        section: Any = self._section(**given) if decoupled else Adam(**given)
        super().__init__(params, section)


def _named(name: str, section: type[Section], first: str, **defaults: Any) -> type[_WithArguments]:
    """first: what DeepSpeed calls the parameters to train. defaults: of the other arguments, in its order."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    others = [Parameter(key, kind, default=value) for key, value in defaults.items()]
    signature = Signature([Parameter(first, kind), *others])
    return type(name, (_WithArguments,), {"__signature__": signature, "_section": section})


_BETAS = {"betas": (0.9, 0.999)}
_ADAM = {"lr": 1e-3, "bias_correction": True, **_BETAS, "eps": 1e-8}
_PLAIN, _CPU = {"weight_decay": 0.0, "amsgrad": False}, {"fp32_optimizer_states": True}
_BOUNDS = {"max_grad_norm": 0.0, "max_coeff": 10.0, "min_coeff": 0.01, "amsgrad": False}

FusedAdam = _named("FusedAdam", AdamW, "params", **_ADAM, adam_w_mode=True, **_PLAIN, set_grad_none=True)
DeepSpeedCPUAdam = _named("DeepSpeedCPUAdam", AdamW, "model_params", **_ADAM, **_PLAIN, adamw_mode=True, **_CPU)
DeepSpeedCPUAdagrad = _named("DeepSpeedCPUAdagrad", Adagrad, "model_params", lr=1e-2, eps=1e-10, **_PLAIN, **_CPU)
FusedLamb = _named("FusedLamb", Lamb, "params", **_ADAM, eps_inside_sqrt=False, weight_decay=0.0, **_BOUNDS)
FusedLion = _named("FusedLion", Lion, "params", lr=1e-3, **_BETAS, weight_decay=0.0, set_grad_none=True)
DeepSpeedCPULion = _named("DeepSpeedCPULion", Lion, "model_params", lr=1e-3, **_BETAS, weight_decay=0.0, **_CPU)


class OnebitAdam(ByName):
    """1-bit Adam, by the name in the configuration."""


class ZeroOneAdam(ByName):
    """0/1 Adam, by the name in the configuration."""


class OnebitLamb(ByName):
    """1-bit LAMB, by the name in the configuration."""
