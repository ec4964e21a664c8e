"""Whole and local tensors of one parameter (`deepspeed.utils.safe_get_...`), on `Engine.view` and `Engine.rewrite`.

The functions on full tensors are collective, at every stage. Local ones are about this rank's part of a parameter,
which is a range of its flattened elements as the engine cuts them; they are flat and may be empty. Names of optimizer
states are those of the native rules: exp_avg, exp_avg_sq and so on.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from trilithon.compat.deepspeed.engines import engine_of
from trilithon.engine.engine import Engine
from trilithon.errors import ProtocolError


@dataclass(frozen=True)
class fragment_address:
    """Where a parameter's elements begin in a flat buffer, and how many there are."""

    numel: int
    start: int


def _whole(param: nn.Parameter, kind: str) -> Tensor | None:
    engine, name = engine_of(param)
    if engine is None:
        return None
    try:
        return next((tensor for _, tensor in engine.view(kind, glob.escape(name))), None)
    except ProtocolError:  # a state that the rule does not keep (yet), a gradient outside backward and step
        return None


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The whole fp32 master; None for a parameter of no engine, or a frozen one."""
    return _whole(param, "master")


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The whole mean gradient, unscaled, before clipping; None unless between backward and step."""
    return _whole(param, "grad")


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """One whole state of the optimizer; None when it keeps none of that name."""
    return _whole(param, optim_state_key)


def _rewrite(param: nn.Parameter, kind: str, value: Tensor) -> None:
    engine, name = engine_of(param)
    if engine is None:
        raise ProtocolError("this parameter belongs to no engine: there is nothing of it to write.")
    engine.rewrite(kind, name, value)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """The whole master becomes `value` (the same on every rank), and what forward reads follows."""
    _rewrite(param, "master", value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """The whole mean gradient becomes `value`, between backward and step."""
    _rewrite(param, "grad", value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """One whole state of the optimizer becomes `value`."""
    _rewrite(param, optim_state_key, value)


def safe_update_full_grad_vectorized(
    params: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Each gradient becomes update_func(whole gradient, parameter)."""
    for param in params:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _stage3(param: nn.Parameter) -> tuple[Engine, str]:
    engine, name = engine_of(param)
    assert engine is not None and engine.config.zero.stage == 3, (
        "local parts of a parameter are there at ZeRO stage 3 only; use safe_get_full_... or safe_set_full_..."
    )
    return engine, name


def _local(param: nn.Parameter, kind: str) -> Tensor | None:
    engine, name = _stage3(param)
    try:
        return engine.own_part(kind, name)[0]
    except ProtocolError:
        return None


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """[n] of the master."""
    return _local(param, "master")


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """[n] of the mean gradient. The first call after a backward is collective."""
    return _local(param, "grad")


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """[n] of one state of the optimizer."""
    return _local(param, optim_state_key)


def _set_local(param: nn.Parameter, kind: str, value: Tensor) -> None:
    engine, name = _stage3(param)
    engine.rewrite_own(kind, name, value)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """[n] as `safe_get_local_fp32_param` gives it."""
    _set_local(param, "master", value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """[n] as `safe_get_local_grad` gives it."""
    _set_local(param, "grad", value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """[n] as `safe_get_local_optimizer_state` gives it."""
    _set_local(param, optim_state_key, value)
