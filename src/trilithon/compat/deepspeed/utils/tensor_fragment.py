"""Whole and local tensors of one parameter (`deepspeed.utils.safe_get_...`), on `Engine.view` and `Engine.rewrite`.

optim_state_key: a kind of tensor of `Engine.view`, such as "exp_avg"; functions that do not take it are about "master"
(fp32 values) or "grad" (the mean gradient, unscaled, between backward and step). Whole tensors are collective, at every
stage; local ones are this rank's part of a parameter at stage 3, flat, maybe empty, their first gradient collective.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from trilithon.engine.engine import Engine
from trilithon.engine.owners import engine_of
from trilithon.errors import ProtocolError


@dataclass(frozen=True)
class fragment_address:
    """Where a parameter's elements begin in a flat buffer, and how many there are."""

    numel: int
    start: int


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """The whole tensor; None for a parameter of no engine, or a frozen one, and for what is not there (now)."""
    engine, name = engine_of(param)
    try:
        found = engine.view(optim_state_key, glob.escape(name)) if engine is not None else ()
        return next((tensor for _, tensor in found), None)
    except ProtocolError:
        return None


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """The whole tensor becomes `value`, the same on every rank; what forward reads follows a master."""
    engine, name = engine_of(param)
    if engine is None:
        raise ProtocolError("this parameter belongs to no engine: there is nothing of it to write.")
    engine.rewrite(optim_state_key, name, value)


def _stage3(param: nn.Parameter) -> tuple[Engine, str]:
    engine, name = engine_of(param)
    assert engine is not None and engine.config.zero.stage == 3, (
        "local parts of a parameter are there at ZeRO stage 3 only; use safe_get_full_... or safe_set_full_..."
    )
    return engine, name


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """[n] of it; None for what is not there (now)."""
    engine, name = _stage3(param)
    try:
        return engine.own_part(optim_state_key, name)[0]
    except ProtocolError:
        return None


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    engine, name = _stage3(param)
    engine.rewrite_own(optim_state_key, name, value)


for _verb in ("get_full", "set_full", "get_local", "set_local"):
    _function = globals()[f"safe_{_verb}_optimizer_state"]
    for _name, _kind in {"fp32_param": "master", "grad": "grad"}.items():
        globals()[f"safe_{_verb}_{_name}"] = partial(_function, optim_state_key=_kind)


def safe_update_full_grad_vectorized(
    params: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Each gradient becomes update_func(whole gradient, parameter)."""
    for param in params:
        if (gradient := safe_get_full_optimizer_state(param, "grad")) is not None:
            safe_set_full_optimizer_state(param, update_func(gradient, param), "grad")
