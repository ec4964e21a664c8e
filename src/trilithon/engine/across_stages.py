"""Whole tensors of all stages of a pipeline, one at a time, on every rank.

A stage that has a tensor announces it to the ranks of its pipeline and broadcasts it. What several stages hold is
gathered by all of them together and told by the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trilithon.contracts import Tag
from trilithon.errors import ProtocolError

if TYPE_CHECKING:
    from trilithon.engine.engine import Engine

Items = Iterable[tuple[str, Tensor]]


def across_stages(
    engine: Engine, items_of: Callable[[Sequence[str]], Items], names: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Collective: (name, tensor) of all stages. items_of(names): of this stage, of which it has `names`.

    Raises ProtocolError on all ranks when items_of does on one.
    """
    pipelined, pipe = engine._pipelined, engine.mesh.pipe
    if pipelined is None or pipe.world_size == 1:
        yield from items_of(names)
        return
    plan = pipelined.plan
    for stage in range(plan.stages):
        for holders in [ties for ties in plan.ties if ties[0] == stage]:
            here = [name for name in names if plan.stages_of(name) == holders] if plan.stage in holders else []
            yield from _told_by(engine, stage, items_of(here) if plan.stage in holders else ())
        here = [name for name in names if plan.stages_of(name) == (stage,)]
        yield from _told_by(engine, stage, items_of(here) if plan.stage == stage else ())


def _told_by(engine: Engine, stage: int, items: Items) -> Iterator[tuple[str, Tensor]]:
    """What `stage` has in `items`; a rank of another stage that has them as well goes through its own beside it."""
    pipe, mine = engine.mesh.pipe, iter(items)
    tag = Tag("whole tensors of all stages")
    while True:
        name, tensor, error = "", None, None
        try:
            name, tensor = next(mine, ("", None))
        except ProtocolError as caught:
            error = caught
        told = None
        if pipe.rank == stage:
            shape = (tensor.dtype, tuple(tensor.shape)) if tensor is not None else None
            told = (name, shape, str(error) if error is not None else None)
        name, shape, text = pipe.all_gather_object(told, tag)[stage]
        if error is not None:
            raise error
        if text is not None:
            raise ProtocolError(text)
        if shape is None:
            return
        if pipe.rank == stage and tensor is not None:
            tensor = tensor.detach().contiguous()
        else:
            tensor = torch.empty(shape[1], dtype=shape[0], device=engine.device)
        if tensor.numel():
            pipe.broadcast(tensor, stage, tag).wait()
        yield name, tensor


def merged(engine: Engine, found: Mapping[str, Any]) -> dict[str, Any]:
    """Collective: plain values by name of all stages of this pipeline, those of earlier ones first."""
    if engine._pipelined is None or engine.mesh.pipe.world_size == 1:
        return dict(found)
    told = engine.mesh.pipe.all_gather_object(dict(found), Tag("values of all stages"))
    everything: dict[str, Any] = {}
    for theirs in told:
        everything.update({name: value for name, value in theirs.items() if name not in everything})
    return everything
