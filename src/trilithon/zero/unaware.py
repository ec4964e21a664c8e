"""Models with cut parameters in the hands of programs that know nothing of slices.

    with trilithon.zero.init():
        model = GPT(config)
    trilithon.zero.allow_unaware(model)
    model.cpu().state_dict()        # moves buffers; parameters that are cut stay where they are, and show as "meta"

Without it both raise ShardedParameterError, since the values are not there.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from trilithon.zero.own_slice import is_cut
from trilithon.zero.sharded_parameter import shapes_only


def allow_unaware(module: nn.Module, *, allow: bool = True) -> None:
    """From now on `state_dict()` of the module, its children not included, shows parameters that are cut as shapes
    without values ("meta") and reads nothing, and `to()`, `cpu()` and their kin move what is not cut. allow=False: as
    before. Parameters that are whole, for a while or always, are treated as usual."""
    for name, replacement in {"_save_to_state_dict": _save_shapes, "_apply": _apply_to_uncut}.items():
        if not allow:
            vars(module).pop(name, None)
        elif name not in vars(module):
            object.__setattr__(module, name, functools.partial(replacement, module))


def _save_shapes(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    with shapes_only():
        type(module)._save_to_state_dict(module, *args, **kwargs)


def _apply_to_uncut(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    cut = {name: param for name, param in module._parameters.items() if param is not None and is_cut(param)}
    module._parameters.update(dict.fromkeys(cut))
    try:
        applied: nn.Module = type(module)._apply(module, *args, **kwargs)
        return applied
    finally:
        module._parameters.update(cut)
