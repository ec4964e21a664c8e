"""Which modules of a model are recomputed: by class, by name, or those that stand several times in a list."""

from __future__ import annotations

import fnmatch

from torch import nn

from trilithon.config import RecomputeConfig
from trilithon.errors import ConfigError


def chosen_blocks(model: nn.Module, settings: RecomputeConfig) -> list[str]:
    """Names of the modules that `settings` are about, in order.

    Raises ConfigError if there are none, or if one is compiled: its forward cannot be replaced.
    """
    modules = dict(model.named_modules())
    if settings.classes or settings.modules:
        found = [
            name
            for name, module in modules.items()
            if name
            and (
                type(module).__name__ in settings.classes
                or any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.modules)
            )
        ]
        asked = [*settings.classes, *settings.modules]
    else:
        found, asked = _repeated_blocks(model), ["a block that stands several times in a list of modules"]
    if not found:
        kinds = sorted({type(module).__name__ for name, module in modules.items() if name})
        raise ConfigError(
            f"recompute: the model has nothing that is {' or '.join(asked)}. Name classes of its modules in "
            f"recompute.classes ({', '.join(kinds[:12])}) or patterns of names in recompute.modules."
        )
    chosen = found[:: settings.every]
    for name in chosen:
        module = modules[name]
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConfigError(
                f"recompute: block '{name}' is compiled, and its forward cannot be replaced. Compile modules inside "
                "it, or leave it out with recompute.modules."
            )
    return chosen


def _repeated_blocks(model: nn.Module) -> list[str]:
    """Entries of lists of modules whose class stands there at least twice, if they have parameters and are made of
    other modules (a single layer keeps little but its input anyway); outermost only."""
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(_inside(name, outer) for outer in found):
            continue
        kinds = [type(child) for child in module.children()]
        for key, child in module.named_children():
            if kinds.count(type(child)) > 1 and child._modules and next(child.parameters(), None) is not None:
                found.append(f"{name}.{key}" if name else key)
    return found


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(outer + ".")
