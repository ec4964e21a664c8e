"""Small tables to save, and several ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trilithon.checkpoint import Contents, Holding, Span

ABOUT = {"world_size": 1, "zero_stage": 0, "precision": "fp32", "config": {}, "library": "0"}


def opened(tensors: Mapping[str, Tensor]) -> Callable[[], Any]:
    @contextmanager
    def open_() -> Iterator[Mapping[str, Tensor]]:
        yield tensors

    return open_


def whole(part: str, name: str, tensor: Tensor, *, replicated: bool = True) -> Holding:
    span = Span(part, name, tensor.dtype, tuple(tensor.shape), 0, tensor.numel(), 0)
    return Holding(f"{part}/{name}", (span,), opened({part: tensor.reshape(-1)}), replicated)


def piece(part: str, name: str, tensor: Tensor, start: int, stop: int) -> Holding:
    """This rank's range of a cut tensor, at an offset in a larger flat buffer, as slices are."""
    flat = torch.cat([torch.full((5,), 77, dtype=tensor.dtype), tensor.reshape(-1)[start:stop]])
    span = Span(part, name, tensor.dtype, tuple(tensor.shape), start, stop - start, 5)
    return Holding(f"{part}/{name}/{start}", (span,), opened({part: flat}), False)


def contents(holdings: Sequence[Holding], step: int = 1, **fields: Any) -> Contents:
    return Contents(step, holdings, about=ABOUT, **fields)


def model(step: int) -> dict[str, Tensor]:
    """Values that tell which step they are of."""
    return {
        "layer.weight": torch.full((6, 4), float(step)),
        "layer.bias": torch.full((4,), step, dtype=torch.bfloat16),
        "count": torch.tensor(step),
    }


def model_contents(step: int) -> Contents:
    return contents(
        [whole("master", name, tensor) for name, tensor in model(step).items()], step, shared={"step": step}
    )


class ThreadRank:
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.world_size, self._barrier, self._board = rank, world_size, barrier, board

    def exchange(self, value: Any, what: str) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(20)
        values = list(self._board)
        self._barrier.wait(20)
        return values


def on_thread_ranks(world_size: int, body: Callable[[ThreadRank], Any]) -> list[Any]:
    """What `body` returned or raised on each rank."""
    barrier, board = threading.Barrier(world_size), [None] * world_size
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadRank(rank, world_size, barrier, board))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
