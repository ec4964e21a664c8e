"""Initial values on their way into a unit, from wherever the user's model keeps them.

Ordinary parameters are broadcast from rank 0; parameters built under `zero.init` are gathered one at a time; parameters
on the meta device get their values from their module's own `reset_parameters`, in order of construction, so that they
equal those of an ordinary construction from the same random state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from trilithon.contracts import Collectives
from trilithon.errors import ConfigError
from trilithon.tiers import resident
from trilithon.zero.init import built_values
from trilithon.zero.unit import Unit


def initial_values(unit: Unit, comm: Collectives, device: torch.device) -> Tensor:
    """[padded] in the unit's master type (frozen units: in their own), gaps zero; frees the model's own copies."""
    dtype = unit.master_dtype if unit.trainable else unit.dtype
    values = resident(unit.layout.padded, dtype, device)
    equal_already = True
    for field, param in zip(unit.layout.fields, unit.params, strict=True):
        whole = built_values(param)
        if whole is None:
            equal_already = False
            whole = param.data
        values[field.start : field.stop].view(field.shape).copy_(whole)
        del whole
        param.data = torch.empty(0, dtype=unit.dtype, device=device)
    if not equal_already:
        comm.broadcast(values, 0, unit.tag()).wait()
    return values


def refuse_unready(name: str, param: Tensor) -> None:
    if isinstance(param, UninitializedParameter):
        raise ConfigError(
            f"parameter '{name}' has no shape yet (a lazy module). Run one forward of the model before initialize()."
        )
    if param.is_meta:
        raise ConfigError(
            f"parameter '{name}' is on the meta device and its module has no reset_parameters() to give it values. "
            "Load values into it first, or build the model under trilithon.zero.init() without the meta device."
        )
    if param.dtype.is_complex and param.requires_grad:
        raise ConfigError(f"parameter '{name}' is complex, which is not supported; keep its real and imaginary parts.")


def materialize_meta(model: nn.Module, device: torch.device) -> None:
    """Give every meta parameter and buffer of modules with `reset_parameters` memory and values.

    A tied parameter stays tied, in a new Parameter object. (Swapping the object's contents would keep it, but torch
    refuses that for tensors with weak references, which recurrent layers hold.)
    """
    fresh: dict[int, tuple[Tensor, Tensor]] = {}  # id of a meta tensor -> it, and what replaces it
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        waiting = [tensor for tensor in own if tensor.is_meta and id(tensor) not in fresh]
        ready = callable(reset) and not any(isinstance(tensor, UninitializedParameter) for tensor in waiting)
        if not ready and not any(id(tensor) in fresh for tensor in own):
            continue
        if ready:
            fresh.update((id(tensor), (tensor, _empty_like(tensor, device))) for tensor in waiting)
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) in fresh:
                    setattr(module, name, fresh[id(tensor)][1])
        if ready and waiting and callable(reset):
            with torch.no_grad():
                reset()


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    values = torch.empty_like(tensor, device=device)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
