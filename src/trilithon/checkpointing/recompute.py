"""Blocks that keep their inputs instead of their activations, and compute these again when backward needs them.

For a network of n equal blocks the activations that stay are the n inputs, and backward costs one more forward (Chen et
al. 2016, arXiv:1604.06174, section 4). What autograd saves inside a block is replaced by place-holders (torch's
non-reentrant checkpoint); on top of it come here: inputs that rest elsewhere (see `rest`), results that are kept
(see `selective`), random states per device and per stream, and a check that nobody wrote over an input.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from trilithon.checkpointing.boundary import Boundary
from trilithon.checkpointing.contiguous import Buffers, ContiguousRest
from trilithon.checkpointing.offload import HostRest
from trilithon.checkpointing.partition import PartitionedRest
from trilithon.checkpointing.rest import DeviceRest, Kept, Rest
from trilithon.checkpointing.selective import KeptResults, Policy, keep_named
from trilithon.config import RecomputeConfig
from trilithon.contracts import Collectives


class Stream(Protocol):
    """A source of random numbers beside torch's generators, or a switch between them: its place can be put back."""

    def mark(self) -> Any:
        """Where it is now."""
        ...

    def back_to(self, mark: Any) -> None: ...


@dataclass(frozen=True)
class Manner:
    """How blocks are recomputed: where inputs rest, which results are kept, which streams are put back."""

    rest: Rest = field(default_factory=DeviceRest)
    policy: Policy | None = None
    streams: Sequence[Stream] = ()
    boundary: Boundary = field(default_factory=Boundary)


def make_manner(
    settings: RecomputeConfig, *, group: Collectives | None = None, inputs: int = 1, streams: Sequence[Stream] = ()
) -> Manner:
    """What `settings` say. group: the tensor ranks that share inputs; inputs: how many are kept at a time, for the size
    of contiguous buffers when `settings.number` is not given."""
    number = settings.number or inputs
    rest: Rest
    if settings.tier == "host":
        rest = HostRest(Buffers(number, off_device=True) if settings.contiguous else None)
    else:
        rest = ContiguousRest(number) if settings.contiguous else DeviceRest()
    if settings.partition and group is not None and group.world_size > 1:
        rest = PartitionedRest(rest, group)
    policy = keep_named(settings.keep_ops) if settings.policy == "selective" else None
    return Manner(rest, policy, streams, Boundary(synchronize=settings.synchronize, profile=settings.profile))


def recomputed(function: Callable[..., Any], *args: Any, rest: Rest | None = None, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose activations are forgotten and computed again in backward, bit for bit.

    Random numbers are drawn alike both times. Tensors may stand anywhere in (nested) lists, tuples and dictionaries.
    rest: where inputs rest until then; None: where they are. `function` must do the same both times, and must not
    write over its inputs: ProtocolError in backward if somebody did (inputs that were copied elsewhere are unharmed).
    """
    return recomputed_as(Manner() if rest is None else Manner(rest), _name_of(function), function, args, kwargs)


def recomputed_as(
    manner: Manner, block: Hashable, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """`recomputed` with everything that a `Manner` says. block: what the function is called in messages and reports."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return checkpoint(_Call(manner, block, function, args, kwargs), use_reentrant=False, preserve_rng_state=False)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


class _Call:
    """One call of a block: itself the first time, and a repetition from what was kept every other time."""

    def __init__(
        self, manner: Manner, block: Hashable, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:  # fmt: skip
        self._manner, self._block, self._function = manner, block, function
        leaves, self._spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self._first: list[Any] | None = leaves
        manner.rest.begin(block)
        self._kept: list[Any] = [manner.rest.keep(leaf) if _is_value(leaf) else leaf for leaf in leaves]
        self._holds = [_is_value(leaf) for leaf in leaves]
        self._random = _RandomState((leaf.device for leaf in leaves if _is_value(leaf)), manner.streams)
        self._results = KeptResults(manner.policy) if manner.policy is not None else None

    def __call__(self) -> Any:
        results, boundary = self._results, self._manner.boundary
        if self._first is not None:
            leaves, self._first = self._first, None
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
            with boundary.around(self._block, again=False), results.record() if results else nullcontext():
                return self._function(*args, **kwargs)
        with boundary.around(self._block, again=True):
            leaves = [cast(Kept, k).fetch() if holds else k for k, holds in zip(self._kept, self._holds, strict=True)]
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
            with self._random.again(), results.replay() if results else nullcontext():
                return self._function(*args, **kwargs)


def _is_value(leaf: Any) -> bool:
    """A tensor that has to be kept; a parameter is the model's, and may be cut when it is not in use."""
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)


class _RandomState:
    """The generators of the CPU and of the CUDA devices in use, and further streams, as they were."""

    def __init__(self, devices: Iterator[torch.device], streams: Sequence[Stream]) -> None:
        self._cpu = torch.get_rng_state()
        used = {device for device in devices if device.type == "cuda"}
        if torch.cuda.is_initialized():
            used.add(torch.device("cuda", torch.cuda.current_device()))
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in used}
        self._marks = [(stream, stream.mark()) for stream in streams]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, numbers are drawn as they were then; afterwards, as if nothing had been drawn."""
        now = [(stream, stream.mark()) for stream, _ in self._marks]
        with torch.random.fork_rng(devices=[device.index for device in self._cuda]):
            torch.set_rng_state(self._cpu)
            for device, state in self._cuda.items():
                torch.cuda.set_rng_state(state, device)
            for stream, mark in self._marks:
                stream.back_to(mark)
            try:
                yield
            finally:  # torch leaves by an exception once backward has all it needs, also between a region's ends
                for stream, mark in now:
                    stream.back_to(mark)


class Recompute:
    """Blocks of one model (of `chosen_blocks`) are recomputed, as `settings` say, until `remove`.

    group: the tensor ranks that share the inputs, for `settings.partition`. The only attribute of ours on somebody
    else's module is the block's `forward`: it has to run in place of the class's own, and a module hook cannot do that.
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], settings: RecomputeConfig, *, group: Collectives | None = None,
        streams: Sequence[Stream] = (),
    ) -> None:  # fmt: skip
        self.names = list(names)
        self._manner = make_manner(settings, group=group, inputs=max(len(self.names), 1), streams=streams)
        self._before: list[tuple[nn.Module, Any]] = []
        for name in self.names:
            self._wrap(name, model.get_submodule(name))

    def _wrap(self, name: str, block: nn.Module) -> None:
        forward, manner = block.forward, self._manner
        self._before.append((block, vars(block).get("forward")))
        again = lambda *args, **kwargs: recomputed_as(manner, name, forward, args, kwargs)  # noqa: E731
        object.__setattr__(block, "forward", again)

    @property
    def rest(self) -> Rest:
        return self._manner.rest

    @property
    def boundary(self) -> Boundary:
        return self._manner.boundary

    def bytes(self) -> dict[str, int]:
        """Bytes of the inputs that are kept now, by tier; memory that waits to be used again included."""
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
