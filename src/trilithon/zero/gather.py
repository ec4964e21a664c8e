"""`gathered(params, modify=...)`: parameters whole for a while, and no write that is silently lost.

    with trilithon.zero.gathered(model.head.weight, modify=0):
        if rank == 0:
            model.head.weight.mul_(0.5)     # rank 0's values become everybody's when the context ends

Opened for reading (no `modify`), a change of values raises on all ranks when the context ends.
(The idea of temporary gathering: ZeRO stage 3, Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from trilithon.errors import ProtocolError, ShardedParameterError
from trilithon.zero.sharded_parameter import Owner, ShardedParameter, find_owner

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def gathered(params: nn.Parameter | nn.Module | Iterable[Tensor], modify: int | None = None) -> Iterator[None]:
    """Give `params` (one, several, or all of a module) their whole values inside the context.

    modify: None to read only; a rank to let that rank write, after which its values are broadcast, cut, and also taken
    over by the fp32 masters. Collective: every rank opens and leaves it. Parameters of no engine are left alone; those
    that are whole anyway (stages 0 to 2) are only watched and made equal. Opened for reading inside a forward or
    backward of the engine, it is that forward's use of the parameters: whole until it ends, and again in its backward.
    Raises ProtocolError, on every rank, if values changed without `modify`, if an entry is not a parameter, or if
    `modify` is not a rank. After an exception inside, or that one, the values are those from before.
    """
    chosen = _listed(params)
    if modify is None and _joined([param for param in chosen if isinstance(param, ShardedParameter)]):
        yield
        return
    if modify is not None and (isinstance(modify, bool) or not isinstance(modify, int)):
        raise ProtocolError(f"gathered(modify={modify!r}): give the number of the rank that writes, or None to read.")
    owners: dict[int, tuple[Owner, list[nn.Parameter]]] = {}
    for param in chosen:
        owner = find_owner(param)
        if owner is not None:
            owners.setdefault(id(owner), (owner, []))[1].append(param)
    with ExitStack() as stack:
        for owner, owned in owners.values():
            stack.enter_context(owner.hold(owned, modify))
        yield


def _joined(cut: list[ShardedParameter]) -> bool:
    """Parameters that are cut now have become part of the forward or backward that is under way, as if it read them: a
    function that saved the values finds them again. False outside of one, and for none."""
    try:
        for param in cut:
            param.detach()
    except ShardedParameterError:
        return False
    return bool(cut)


def _listed(params: nn.Parameter | nn.Module | Iterable[Tensor]) -> list[nn.Parameter]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    entries = [params] if isinstance(params, Tensor) or not isinstance(params, Iterable) else list(params)
    chosen: dict[int, nn.Parameter] = {}
    for entry in entries:
        if not isinstance(entry, nn.Parameter):
            raise ProtocolError(
                f"gathered() got a {type(entry).__name__}; it takes a parameter, a module, or an iterable of "
                "parameters."
            )
        chosen[id(entry)] = entry
    return list(chosen.values())


def require_rank(modify: int | None, world_size: int) -> None:
    if modify is not None and not 0 <= modify < world_size:
        raise ProtocolError(f"gathered(modify={modify}): there are the ranks 0 to {world_size - 1}.")


@contextmanager
def restored_on_error(values: Iterable[Tensor]) -> Iterator[None]:
    """When an exception leaves the context, these tensors hold again what they held when it was opened."""
    kept = [(value, value.detach().clone()) for value in values]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for value, before in kept:
                value.data.copy_(before)
        raise


def fingerprints(values: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """(version, sum of bit patterns) of each tensor: changes with almost any write, in place or through `.data`."""
    found = {}
    for name, value in values.items():
        bits = value.detach().reshape(-1).view(_BITS[value.element_size()]) if value.numel() else value.detach()
        found[name] = (value._version, int(bits.sum(dtype=torch.int64)))
    return found


def changed_since(before: Mapping[str, tuple[int, int]], values: Mapping[str, Tensor]) -> set[str]:
    after = fingerprints(values)
    return {name for name in values if before[name] != after[name]}
