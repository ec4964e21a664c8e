"""Blocks that keep their inputs instead of their activations, and compute these again when backward needs them.

For a network of n equal blocks the activations that stay are the n inputs, and backward costs one more forward (Chen et
al. 2016, arXiv:1604.06174, section 4). What autograd saves inside a block is replaced by place-holders (torch's
non-reentrant checkpoint); on top of it come here: inputs that rest in host memory, random states per device, a check
that nobody wrote over an input, and blocks chosen by class, name or size.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from trilithon.checkpointing.offload import DeviceRest, HostRest, Kept, Rest
from trilithon.config import RecomputeConfig
from trilithon.errors import ConfigError


def recomputed(function: Callable[..., Any], *args: Any, rest: Rest | None = None, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose activations are forgotten and computed again in backward, bit for bit.

    Random numbers are drawn alike both times. Tensors may stand anywhere in (nested) lists, tuples and dictionaries.
    rest: where inputs rest until then; None: where they are. `function` must do the same both times, and must not
    write over its inputs: ProtocolError in backward if somebody did (with host memory the copy from before is used).
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return checkpoint(
        _Call(function, args, kwargs, rest or DeviceRest()), use_reentrant=False, preserve_rng_state=False
    )


class _Call:
    """One call of a block: itself the first time, and a repetition from what was kept every other time."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, rest: Rest) -> None:
        self._function = function
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._first: list[Any] | None = leaves
        rest.begin()
        self._kept: list[Any] = [rest.keep(leaf) if _is_value(leaf) else leaf for leaf in leaves]
        self._holds = [_is_value(leaf) for leaf in leaves]
        self._random = _RandomState(leaf.device for leaf in leaves if _is_value(leaf))

    def __call__(self) -> Any:
        if self._first is not None:
            leaves, self._first = self._first, None
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
            return self._function(*args, **kwargs)
        leaves = [cast(Kept, k).fetch() if holds else k for k, holds in zip(self._kept, self._holds, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        with self._random.again():
            return self._function(*args, **kwargs)


def _is_value(leaf: Any) -> bool:
    """A tensor that has to be kept; a parameter is the model's, and may be cut when it is not in use."""
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)


class _RandomState:
    """The generators of the CPU and of the CUDA devices in use, as they were."""

    def __init__(self, devices: Iterator[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        used = {device for device in devices if device.type == "cuda"}
        if torch.cuda.is_initialized():
            used.add(torch.device("cuda", torch.cuda.current_device()))
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in used}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, numbers are drawn as they were then; afterwards, as if nothing had been drawn."""
        with torch.random.fork_rng(devices=[device.index for device in self._cuda]):
            torch.set_rng_state(self._cpu)
            for device, state in self._cuda.items():
                torch.cuda.set_rng_state(state, device)
            yield


class Recompute:
    """Blocks of one model (of `chosen_blocks`) are recomputed until `remove`. tier: where their inputs rest.

    The only attribute of ours on somebody else's module is the block's `forward`: it has to run in place of the class's
    own, and a module hook cannot do that.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], tier: Literal["device", "host"] = "device") -> None:
        self.names = list(names)
        self.rest: HostRest | DeviceRest = HostRest() if tier == "host" else DeviceRest()
        self._before: list[tuple[nn.Module, Any]] = []
        for name in self.names:
            self._wrap(model.get_submodule(name))

    def _wrap(self, block: nn.Module) -> None:
        forward, rest = block.forward, self.rest
        self._before.append((block, vars(block).get("forward")))
        object.__setattr__(block, "forward", lambda *args, **kwargs: recomputed(forward, *args, rest=rest, **kwargs))

    def bytes(self) -> dict[str, int]:
        """Bytes of the inputs that are kept now, by tier."""
        return self.rest.bytes()

    def remove(self) -> None:
        """The blocks are as they were; graphs that exist already can still be run backwards."""
        for block, before in self._before:
            if before is None:
                vars(block).pop("forward", None)
            else:
                object.__setattr__(block, "forward", before)
        self._before.clear()
        self.rest.close()


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
