"""Batches for whole steps, from a loader that ends on every rank together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from trilithon.errors import ProtocolError

if TYPE_CHECKING:
    from trilithon.engine.training import Training

logger = logging.getLogger(__name__)


def whole_steps(training: Training, loader: Iterable[Any] | None, *, repeat: bool) -> Iterator[list[Any]]:
    """Lists of as many micro-batches as a step has, until one rank has no full list left. Collective.

    loader: None on ranks that need no data. repeat: begin it anew when it ends, in the middle of a step if need be.
    Raises ProtocolError, on all ranks, for one that is to repeat and cannot be begun anew, or is empty.
    """
    wanted, iterator = training.accumulation, iter(loader) if loader is not None else None
    while True:
        found = list(islice(iterator, wanted)) if iterator is not None else []
        problem = None
        while repeat and loader is not None and len(found) < wanted and problem is None:
            problem = _why_not_again(loader)
            iterator = iter(loader)
            more = list(islice(iterator, wanted - len(found))) if problem is None else []
            problem = problem or (None if more else "it is empty")
            found += more
        short = loader is not None and len(found) < wanted
        ended, left, broken = training._sharding.sum(
            (float(short), float(len(found) if short else 0), float(problem is not None)), "the end of the data"
        )
        if broken:
            told = training._sharding.exchange(problem, "the end of the data")
            texts = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
            raise ProtocolError(f"the loader cannot go on after step {training.steps}, on no rank: {'; '.join(texts)}.")
        if ended:
            if training.rank == 0:
                logger.info(
                    "the data end after step %d, on all ranks together: %d of %d have less than the %d micro-batches "
                    "of a step left (%d in all, which are not used)",
                    training.steps, ended, training.world_size, wanted, left,
                )  # fmt: skip
            return
        yield found


def _why_not_again(loader: Iterable[Any]) -> str | None:
    if iter(loader) is loader:
        return f"a {type(loader).__name__} cannot be begun anew; with repeat=True pass a list or a loader"
    return None
