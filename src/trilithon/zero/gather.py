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

from trilithon.errors import ProtocolError
from trilithon.zero.sharded_parameter import Owner, find_owner

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def gathered(params: nn.Parameter | nn.Module | Iterable[Tensor], modify: int | None = None) -> Iterator[None]:
    """Give `params` (one, several, or all of a module) their whole values inside the context.

    modify: None to read only; a rank to let that rank write, after which its values are broadcast, cut, and also taken
    over by the fp32 masters. Collective: every rank opens and leaves it. Tensors that are whole anyway are left alone,
    except that with `modify` an engine's own are still made equal on all ranks.
    Raises ProtocolError, on every rank, if values changed without `modify`, or if an entry is not a tensor.
    """
    chosen = _listed(params)
    owners: dict[int, tuple[Owner, list[nn.Parameter]]] = {}
    for param in chosen:
        owner = find_owner(param)
        if owner is not None and isinstance(param, nn.Parameter):
            owners.setdefault(id(owner), (owner, []))[1].append(param)
    with ExitStack() as stack:
        for owner, owned in owners.values():
            stack.enter_context(owner.hold(owned, modify))
        yield


def _listed(params: nn.Parameter | nn.Module | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, Tensor):
        return [params]
    chosen = list(params)
    for entry in chosen:
        if not isinstance(entry, Tensor):
            raise ProtocolError(
                f"gathered() got a {type(entry).__name__}; it takes a parameter, a module, or an iterable of "
                "parameters."
            )
    return chosen


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
