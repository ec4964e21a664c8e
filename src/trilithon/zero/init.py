"""`zero.init`: build a model of which no rank ever holds more than a slice and a few whole parameters.

    with trilithon.zero.init():
        model = GPT(config)
    engine = trilithon.initialize(model, config)

Parameters are cut as they are registered. Whatever then reads or writes them while the context is open (initialisers,
`self.apply(...)`, `.data.normal_()`, copying rows) gets whole values again, so the initial values are those of an
ordinary construction from rank 0's random state, for any number of ranks. The most recent `open_numel` elements stay
whole, so that a constructor's own initialisation needs no communication. A parameter of which the program still holds
an alias (`w = layer.weight.data`) is cut again only for itself; what is written through the alias counts.
(Construction in slices: Rajbhandari et al. 2021, arXiv:2104.07857, section 7.2.)
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter

from trilithon.comm.collectives import Group
from trilithon.comm.mesh import init_distributed
from trilithon.contracts import Collectives, ReduceOp, Tag
from trilithon.errors import ProtocolError, ShardedParameterError
from trilithon.tiers import SliceFile, resident, settle
from trilithon.zero.gather import changed_since, fingerprints, require_rank
from trilithon.zero.sharded_parameter import (
    ShardedParameter,
    bring_back,
    find_owner,
    forget_owner,
    put_away,
    set_owner,
)

OPEN_NUMEL = 2**22


@contextmanager
def init(
    *, enabled: bool = True, backend: str | None = None, open_numel: int = OPEN_NUMEL, path: Path | str | None = None
) -> Iterator[None]:
    """Cut every parameter registered inside the context over all ranks.

    Collective: all ranks build the same model. enabled=False does nothing; so does a single process. open_numel:
    elements that may be whole at the same time. path: folder on a local disk in which the slices are kept until
    `initialize` takes them over, for models whose slices do not fit into memory; a single process then cuts as well.
    A context inside another one changes nothing. The other ranks' random states (torch, numpy, random) are those of
    rank 0 inside, and their own again afterwards.
    Raises ShardedParameterError when values are read after the context without `trilithon.zero.gathered`.
    """
    if not enabled or _ACTIVE:
        yield
        return
    several = init_distributed(backend, 1800.0) and dist.get_world_size() > 1
    if not several and path is None:
        yield
        return
    comm = Group(dist.group.WORLD if several else None, name="zero.init")
    builder = Builder(comm, open_numel, Path(path) if path is not None else None)
    hook = register_module_parameter_registration_hook(builder.register)
    states = _random_states()
    _set_random_states(comm.all_gather_object(states, Tag("zero.init random state"))[0])
    _ACTIVE.append(builder)
    try:
        yield
    finally:
        hook.remove()
        _ACTIVE.remove(builder)
        builder.finish()
        if comm.rank != 0:
            _set_random_states(states)


_ACTIVE: list[Builder] = []  # of the context that is open in this process


def built_values(param: nn.Parameter) -> Tensor | None:
    """The whole values of a parameter built under `init`, taken out of its builder; None for any other. Collective."""
    owner = find_owner(param)
    return owner.take(param) if isinstance(owner, Builder) else None


def builder_of(param: nn.Parameter) -> Builder | None:
    """Who holds the slices of a parameter built under `init`; None for any other."""
    owner = find_owner(param)
    return owner if isinstance(owner, Builder) else None


class Builder:
    """Owner of the parameters of models under construction (`sharded_parameter.Owner`)."""

    def __init__(self, comm: Collectives, open_numel: int, path: Path | None = None) -> None:
        self._comm, self._open_numel = comm, open_numel
        self._references: dict[int, weakref.ref[nn.Parameter]] = {}  # by id, as everything below
        self._open: dict[int, Tensor] = {}  # whole flat values, oldest first
        self._lingering: dict[int, Tensor] = {}  # id -> whole values that the program still has an alias of
        self._shards: MutableMapping[int, Tensor] = {} if path is None else SliceFile(path)
        self._names: dict[int, str] = {}  # id -> class of its module and its name there, for messages
        self._building = True

    # ------------------------------------------------------------------------------------------------ opening
    def register(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Called by torch for every registration of a parameter."""
        if param is None or isinstance(param, UninitializedParameter) or param.is_meta or not param.is_floating_point():
            return
        if find_owner(param) is not None or not param.is_contiguous():
            return
        set_owner(param, self, keep=True)
        self._references[id(param)] = weakref.ref(param, self._forget(id(param)))
        self._names[id(param)] = f"{type(module).__name__}.{name}"
        whole = resident(self._padded(param), param.dtype, param.device)
        whole[: param.numel()].copy_(param.data.view(-1))
        param.data = whole[: param.numel()].view(param.shape)
        self._open[id(param)] = whole
        self._trim(keep={id(param)})

    def _forget(self, key: int) -> Any:
        def gone(_: object) -> None:
            self._open.pop(key, None)
            self._shards.pop(key, None)
            self._lingering.pop(key, None)
            self._names.pop(key, None)
            self._references.pop(key, None)

        return gone

    def make_whole(self, params: Sequence[nn.Parameter], use: str) -> None:
        if not self._building:
            raise ShardedParameterError(
                f"`{use}` reads {self._names[id(params[0])]} of shape {tuple(params[0].shape)}, which was built under "
                "zero.init() and is cut over the ranks. Read it inside that context or under "
                "`trilithon.zero.gathered(params)`."
            )
        self._trim(keep={id(param) for param in params})
        for param in params:
            self._open_again(param)

    def _open_again(self, param: nn.Parameter) -> None:
        key = id(param)
        if key in self._open:
            return
        self._refresh(param)
        whole = self._lingering.pop(key, None)  # the memory that an alias still shows
        if whole is None:
            whole = resident(self._padded(param), param.dtype, param.device)
        self._comm.all_gather(whole, self._shards.pop(key), Tag("zero.init")).wait()
        bring_back([param], [whole[: param.numel()].view(param.shape)])
        self._open[key] = whole

    # ------------------------------------------------------------------------------------------------ closing
    def _trim(self, keep: set[int]) -> None:
        open_numel = sum(whole.numel() for whole in self._open.values())
        for key in list(self._open):
            if open_numel <= self._open_numel:
                return
            if key not in keep:
                open_numel -= self._open[key].numel()
                self._close(key)

    def _close(self, key: int) -> None:
        whole, param = self._open.pop(key), self._references[key]()
        if param is None:
            return
        if param.data_ptr() != whole.data_ptr() or param.numel() > whole.numel():  # its data was replaced
            values, whole = param.data, resident(self._padded(param), param.dtype, param.device)
            whole[: param.numel()].copy_(values.reshape(-1))
            del values
        self._shards[key] = self._kept(self._own(whole))
        put_away([param])
        storage = whole.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) > 2:  # ours twice (tensor and handle); more: an alias is alive
            self._lingering[key] = whole

    def _refresh(self, param: nn.Parameter) -> None:
        whole = self._lingering.get(id(param))
        if whole is not None:
            self._shards[id(param)] = self._kept(self._own(whole))

    def finish(self) -> None:
        """The context ends: everything is cut."""
        for key in list(self._open):
            self._close(key)
        for key, whole in self._lingering.items():
            self._shards[key] = self._kept(self._own(whole))
        self._lingering.clear()
        self._building = False

    def cut_now(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """Take over a parameter made of values of this builder's, and keep a slice of it only."""
        self.register(module, name, param)  # no effect where the context is open: torch has called it by itself
        if id(param) in self._open:
            self._close(id(param))

    def _kept(self, own: Tensor) -> Tensor:
        return own if isinstance(self._shards, SliceFile) else settle(own)

    def _padded(self, param: Tensor) -> int:
        return -(-max(param.numel(), 1) // self._comm.world_size) * self._comm.world_size

    def _own(self, whole: Tensor) -> Tensor:
        size = whole.numel() // self._comm.world_size
        return whole[self._comm.rank * size : (self._comm.rank + 1) * size]

    # ---------------------------------------------------------------------------------------------- afterwards
    def take(self, param: nn.Parameter) -> Tensor:
        """Whole values, [shape]; the parameter is nobody's afterwards."""
        if isinstance(param, ShardedParameter):
            self._open_again(param)
        for table in (self._open, self._references, self._names):
            table.pop(id(param), None)
        if isinstance(self._shards, SliceFile) and not self._references and not self._building:
            self._shards.close()  # everything has been taken over
        forget_owner(param)
        return param.data

    def own_slice(self, param: nn.Parameter) -> tuple[Tensor, int, int]:
        """(values [n], where they start in the flattened parameter, over how many ranks it is cut); see `own_slice`."""
        whole = self._open.get(id(param))
        own = self._own(whole) if whole is not None else self._shards[id(param)]
        start = min(self._comm.rank * own.numel(), param.numel())
        return own[: min(own.numel(), param.numel() - start)], start, self._comm.world_size

    @contextmanager
    def hold(self, params: Sequence[nn.Parameter], modify: int | None) -> Iterator[Mapping[str, Tensor]]:
        require_rank(modify, self._comm.world_size)
        sharded = [param for param in params if isinstance(param, ShardedParameter)]
        for cut in sharded:
            self._open_again(cut)
        slices = {id(param): self._own(self._open[id(param)]).clone() for param in sharded}
        values = {f"{index}:{self._names[id(param)]}": param for index, param in enumerate(params)}
        before = fingerprints(values) if modify is None else {}
        try:
            yield values
            if modify is None:
                changed = changed_since(before, values)
                self._refuse_changes([name in changed for name in values], params)
            else:
                for param in params:
                    self._comm.broadcast(param.data, modify, Tag("gathered(modify=)")).wait()
        except BaseException:
            self._close_all(sharded)
            self._shards.update(slices)
            for key in slices:
                self._lingering.pop(key, None)
            raise
        self._close_all(sharded)

    def _close_all(self, params: Sequence[nn.Parameter]) -> None:
        for param in params:
            if id(param) in self._open:
                self._close(id(param))

    def _refuse_changes(self, changed: Sequence[bool], params: Sequence[nn.Parameter]) -> None:
        flags = torch.tensor(changed, dtype=torch.int32, device=params[0].device)  # where the group surely talks
        self._comm.all_reduce(flags, Tag("gathered() for reading"), ReduceOp.MAX).wait()
        guilty = [self._names[id(param)] for param, flag in zip(params, flags.tolist(), strict=True) if flag]
        if guilty:
            raise ProtocolError(
                f"values of {guilty} were changed inside gathered(), which was opened for reading. Write "
                "`with trilithon.zero.gathered(params, modify=0):` to keep what rank 0 writes."
            )


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
