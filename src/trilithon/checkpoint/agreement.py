"""Ranks that agree: what one of them fails at, all of them raise, in the same words and at the same point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from trilithon.errors import CheckpointError, TrilithonError

T = TypeVar("T")


class Coordinator(Protocol):
    """How the ranks of one save or load talk. `comm` has one over collectives; a rank alone needs none."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def exchange(self, value: Any, what: str) -> list[Any]:
        """One small picklable value from every rank, in rank order, on every rank. Blocking; what: for messages."""
        ...


class Alone:
    """The coordinator of a single process."""

    rank, world_size = 0, 1

    def exchange(self, value: Any, what: str) -> list[Any]:
        return [value]


def together(ranks: Coordinator, what: str, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank and hand each the results of all. Raises CheckpointError on all ranks if any failed."""
    error: Exception | None = None
    value: T | None = None
    try:
        value = work()
    except Exception as raised:
        error = raised
    told = None if error is None else _told(error)
    answers = ranks.exchange((value if error is None else None, told), what)
    failures = [(rank, text) for rank, (_, text) in enumerate(answers) if text is not None]
    if not failures:
        return [result for result, _ in answers]
    if ranks.world_size == 1 and isinstance(error, TrilithonError):
        raise error
    first = failures[0][1]
    others = [rank for rank, _ in failures]
    who = f"rank {others[0]}" if len(others) == 1 else f"ranks {others}"
    text = first if len(others) == ranks.world_size and len({t for _, t in failures}) == 1 else f"{who}: {first}"
    raise CheckpointError(text) from error


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, TrilithonError) else f"{type(error).__name__}: {error}"
